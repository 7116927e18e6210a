import java.io.PrintWriter;
import java.util.*;
import org.apache.rocketmq.client.producer.*;
import org.apache.rocketmq.common.message.*;

/**
 * args: namesrv gatewayTopic topicA topicB deliverMs output
 * Sends timers whose unique keys repeat: batches, one Message several times, two producers with one key; and one with a
 * time in seconds. output: a line for each acknowledged one: topic body deliverMs
 */
public class RepeatedKeys {
    static String gateway;
    static PrintWriter out;
    static DefaultMQProducer producer = new DefaultMQProducer("P_repeated_keys");

    static Message timer(String topic, String body, long deliver) throws Exception {
        Message message = new Message(gateway, "tag", "key-" + body, body.getBytes("UTF-8"));
        message.putUserProperty("TIERED_TOPIC", topic);
        message.putUserProperty("TIERED_DELIVER_MS", Long.toString(deliver));
        return message;
    }

    static void note(SendResult sent, Message... messages) throws Exception {
        if (sent.getSendStatus() != SendStatus.SEND_OK) throw new IllegalStateException(sent.toString());
        for (Message m : messages)
            out.println(m.getUserProperty("TIERED_TOPIC") + " " + new String(m.getBody(), "UTF-8") + " "
                + m.getUserProperty("TIERED_DELIVER_MS"));
    }

    public static void main(String[] a) throws Exception {
        gateway = a[1];
        String first = a[2], second = a[3];
        long deliver = Long.parseLong(a[4]);
        producer.setNamesrvAddr(a[0]);
        producer.start();
        out = new PrintWriter(a[5], "UTF-8");
        List<Message> batch = new ArrayList<>();
        for (int i = 0; i < 5; i++) batch.add(timer(first, "reminder-" + i, deliver));
        note(producer.send(batch, 10000), batch.toArray(new Message[0]));
        batch.clear();
        for (int i = 0; i < 40; i++) batch.add(timer(first, "apart-" + i, deliver + 100 * i));
        note(producer.send(batch, 10000), batch.toArray(new Message[0]));
        Message again = timer(first, "fan-out", deliver);
        note(producer.send(again, 10000), again);
        again.putUserProperty("TIERED_TOPIC", second);
        note(producer.send(again, 10000), again);
        Message recurring = timer(first, "recurring", deliver);
        for (int i = 0; i < 3; i++) {
            recurring.putUserProperty("TIERED_DELIVER_MS", Long.toString(deliver + 1000 * i));
            note(producer.send(recurring, 10000), recurring);
        }
        for (int i = 0; i < 2; i++) {
            Message container = timer(first, "container-" + i, deliver);
            MessageAccessor.putProperty(container, "UNIQ_KEY", "AC110002000100000000000000000000");
            note(producer.send(container, 10000), container);
        }
        producer.send(timer(first, "seconds", deliver / 1000), 10000);
        out.close();
        producer.shutdown();
    }
}
