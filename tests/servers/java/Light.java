import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.message.*;

/**
 * Sends messages that name light queues in all the ways there are: one, several, one twice, a plain name; every fifth
 * is delayed by a second. (A 5.x dispatches nothing any more behind a plain name that is not the last of its list, and its
 * client refuses a slash.) With "copied" their offsets come along, as in a message from elsewhere.
 * args: namesrv broker topic queues sends copied|own. Prints "DONE" and the number of messages acknowledged.
 */
public class Light {
    static final String[] NAMES = {"%LMQ%one", "%LMQ%one,audit", "%LMQ%one,%LMQ%two", "%LMQ%two,%LMQ%two", "%LMQ%late,%LMQ%two,plain", "%LMQ%late"};
    static final String[] OFFSETS = {"0", "7,0", "1,1", "5,5", "2,3,0", "9"};

    public static void main(String[] a) {
        try {
            send(a);
            System.exit(0);
        } catch (Throwable e) {
            e.printStackTrace();
            System.exit(1);
        }
    }

    static void send(String[] a) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("light");
        producer.setNamesrvAddr(a[0]);
        producer.setSendMsgTimeout(10000);
        producer.setRetryTimesWhenSendFailed(0);
        producer.start();
        int acked = 0;
        for (int i = 0; i < Integer.parseInt(a[4]); i++) {
            Message message = new Message(a[2], "Tag" + i % 3, "light-" + i, ("light " + i).getBytes());
            MessageAccessor.putProperty(message, "INNER_MULTI_DISPATCH", NAMES[i % NAMES.length]);
            if (a[5].equals("copied")) MessageAccessor.putProperty(message, "INNER_MULTI_QUEUE_OFFSET", OFFSETS[i % NAMES.length]);
            if (i % 5 == 4) message.setDelayTimeLevel(1);
            for (int attempt = 0; ; attempt++) {
                try {
                    SendStatus status = producer.send(message, new MessageQueue(a[2], a[1], i % Integer.parseInt(a[3]))).getSendStatus();
                    if (status != SendStatus.SEND_OK) throw new IllegalStateException(status.toString());
                    break;
                } catch (Exception e) {
                    if (attempt == 60) throw e;
                    Thread.sleep(500); // a broker that has only just begun is busy, or not yet known to its name server
                }
            }
            acked++;
            Thread.sleep(5);
        }
        System.out.println("DONE " + acked);
    }
}
