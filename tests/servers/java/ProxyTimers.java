import java.nio.charset.StandardCharsets;
import java.nio.file.*;
import java.util.*;
import org.apache.rocketmq.client.producer.*;
import org.apache.rocketmq.common.message.*;

/**
 * Sends timers, and takes some back.
 * args: namesrv topic output line...
 * line: id,property,value[,recall]; property NONE: an ordinary message. With recall it is recalled at once (5.3.2 and later).
 * output: one line a message: id uniqKey outcome; the outcome is the send's status, the recall's unique key, or the
 *         broker's code and remark, URL-encoded.
 */
public class ProxyTimers {
    public static void main(String[] a) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("timer-producer");
        producer.setNamesrvAddr(a[0]);
        producer.setSendMsgTimeout(10000);
        producer.start();
        List<String> lines = new ArrayList<>();
        for (int i = 3; i < a.length; i++) {
            String[] part = a[i].split(",");
            Message message = new Message(a[1], "timer", part[0], part[0].getBytes(StandardCharsets.UTF_8));
            // Clients of 4.9 have no methods for them.
            if (!part[1].equals("NONE")) MessageAccessor.putProperty(message, part[1], part[2]);
            String outcome;
            try {
                SendResult sent = producer.send(message);
                outcome = sent.getSendStatus().toString();
                if (part.length > 3) {
                    String handle = (String) SendResult.class.getMethod("getRecallHandle").invoke(sent);
                    outcome = "recalled:" + DefaultMQProducer.class.getMethod("recallMessage", String.class, String.class)
                        .invoke(producer, a[1], handle);
                }
            } catch (Exception e) {
                Throwable cause = e instanceof java.lang.reflect.InvocationTargetException ? e.getCause() : e;
                outcome = java.net.URLEncoder.encode(cause.toString(), "UTF-8");
            }
            lines.add(part[0] + " " + message.getProperty("UNIQ_KEY") + " " + outcome);
        }
        Files.write(Paths.get(a[2]), lines);
        producer.shutdown();
        System.exit(0);
    }
}
