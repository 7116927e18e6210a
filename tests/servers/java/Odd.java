import java.util.*;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.message.*;

/**
 * Sends messages of all sorts, round robin over the queues of a topic: plain ones with many properties, bodies
 * compressed by zlib, lz4 and zstd, batches, tiny ones, light queues, random bytes, and some of 4 MiB.
 * args: namesrv broker topic queues sends large first(number in the first key). Prints "DONE" and the number of messages acknowledged.
 */
public class Odd {
    static final int KINDS = 8;
    static int first;

    public static void main(String[] a) throws Exception {
        String topic = a[2];
        int queues = Integer.parseInt(a[3]), sends = Integer.parseInt(a[4]), large = Integer.parseInt(a[5]);
        first = Integer.parseInt(a[6]);
        DefaultMQProducer plain = producer(a[0], "plain", "");
        DefaultMQProducer[] compressing = {producer(a[0], "zlib", "ZLIB"), producer(a[0], "lz4", "LZ4"), producer(a[0], "zstd", "ZSTD")};
        Random random = new Random(5);
        long acked = 0;
        for (int i = 0; i < sends; i++) {
            MessageQueue queue = new MessageQueue(topic, a[1], i % queues);
            int kind = i / queues % KINDS;
            if (kind >= 1 && kind <= 3) {
                acked += sent(compressing[kind - 1], List.of(message(topic, i, text(random, 9000))), queue);
            } else if (kind == 4) {
                List<Message> batch = new ArrayList<>();
                for (int n = 0; n < 5; n++) batch.add(message(topic, i * 10 + n, text(random, 200)));
                acked += sent(plain, batch, queue);
            } else if (kind == 5) {
                Message light = message(topic, i, text(random, 300));
                MessageAccessor.putProperty(light, "INNER_MULTI_DISPATCH", "%LMQ%one,%LMQ%" + i % 3);
                acked += sent(plain, List.of(light), queue);
            } else if (kind == 6) {
                acked += sent(plain, List.of(new Message(topic, new byte[] {(byte) i})), queue);
            } else {
                Message odd = message(topic, i, kind == 0 ? text(random, 100) : bytes(random, 2000));
                odd.putUserProperty("größe", "\u4e2d\u6587 \ud83d\ude80");
                for (int n = 0; n < 40; n++) odd.putUserProperty("property-" + n, "value " + n + " of " + i);
                odd.setFlag(i);
                acked += sent(plain, List.of(odd), queue);
            }
        }
        for (int i = 0; i < large; i++) {
            acked += sent(plain, List.of(message(topic, 1000000 + i, bytes(random, 4 << 20))), new MessageQueue(topic, a[1], i % queues));
        }
        System.out.println("DONE " + acked);
        System.exit(0);
    }

    static int sent(DefaultMQProducer producer, List<Message> messages, MessageQueue queue) throws Exception {
        for (int attempt = 0; ; attempt++) {
            try {
                SendStatus status = messages.size() == 1 ? producer.send(messages.get(0), queue).getSendStatus()
                    : producer.send(messages, queue).getSendStatus();
                if (status != SendStatus.SEND_OK) throw new IllegalStateException(status.toString());
                return messages.size();
            } catch (Exception e) {
                if (attempt == 5) throw e;
                Thread.sleep(500); // a broker that has only just begun is busy now and then
            }
        }
    }

    /** CompressionType came with 5.0: found through the setter. */
    @SuppressWarnings({"unchecked", "rawtypes"})
    static DefaultMQProducer producer(String namesrv, String name, String compression) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("odd-" + name);
        producer.setNamesrvAddr(namesrv);
        producer.setInstanceName(name);
        producer.setSendMsgTimeout(10000);
        producer.setRetryTimesWhenSendFailed(0);
        producer.setMaxMessageSize(4 << 20);
        if (compression.isEmpty()) {
            producer.setCompressMsgBodyOverHowmuch(Integer.MAX_VALUE);
        } else {
            Class type = producer.getClass().getMethod("getCompressType").getReturnType();
            producer.getClass().getMethod("setCompressType", type).invoke(producer, Enum.valueOf(type, compression));
        }
        producer.start();
        return producer;
    }

    static Message message(String topic, int number, byte[] body) {
        return new Message(topic, "Tag" + number % 3, "odd-" + (first + number) + " both", body);
    }

    static byte[] text(Random random, int length) {
        StringBuilder text = new StringBuilder();
        while (text.length() < length) text.append(Integer.toString(random.nextInt(4096), 36)).append(" words ");
        return text.substring(0, length).getBytes(java.nio.charset.StandardCharsets.UTF_8);
    }

    static byte[] bytes(Random random, int length) {
        byte[] found = new byte[length];
        random.nextBytes(found);
        return found;
    }
}
