import java.io.PrintWriter;
import org.apache.rocketmq.client.producer.*;
import org.apache.rocketmq.common.message.*;

/**
 * args: namesrv gatewayTopic targetTopic count firstMs spreadMs output
 * Sends timers through the gateway topic, delivered evenly in [firstMs, firstMs + spreadMs).
 * output: a line for each acknowledged one: uniqKey deliverMs
 */
public class Timers {
    public static void main(String[] a) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("P_timers");
        producer.setNamesrvAddr(a[0]);
        producer.start();
        int count = Integer.parseInt(a[3]);
        long first = Long.parseLong(a[4]), spread = Long.parseLong(a[5]);
        try (PrintWriter out = new PrintWriter(a[6], "UTF-8")) {
            for (int i = 0; i < count; i++) {
                long deliver = first + spread * i / count;
                Message message = new Message(a[1], "tag", "key" + i, ("timer " + i).getBytes("UTF-8"));
                message.putUserProperty("TIERED_TOPIC", a[2]);
                message.putUserProperty("TIERED_DELIVER_MS", Long.toString(deliver));
                SendResult sent = producer.send(message, 10000);
                if (sent.getSendStatus() == SendStatus.SEND_OK) out.println(sent.getMsgId() + " " + deliver);
            }
        }
        producer.shutdown();
    }
}
