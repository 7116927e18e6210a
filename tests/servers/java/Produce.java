import java.nio.charset.StandardCharsets;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Sends messages with keys, tags and unique bodies, and counts acknowledgements.
 * args: namesrv broker(*: as routes say) topics queues messages bodyBytes threads perSecond(0: no limit)
 * Goes on over broker restarts; prints "ACKED n" each second and "DONE acked failed" at the end.
 */
public class Produce {
    public static void main(String[] a) throws Exception {
        String namesrv = a[0], broker = a[1];
        int topics = Integer.parseInt(a[2]), queues = Integer.parseInt(a[3]);
        long messages = Long.parseLong(a[4]);
        int bodyBytes = Integer.parseInt(a[5]), threads = Integer.parseInt(a[6]);
        double perSecond = Double.parseDouble(a[7]);
        AtomicLong next = new AtomicLong(), acked = new AtomicLong(), failed = new AtomicLong();
        DefaultMQProducer producer = new DefaultMQProducer("live-producer");
        producer.setNamesrvAddr(namesrv);
        producer.setSendMsgTimeout(3000);
        producer.setRetryTimesWhenSendFailed(0);
        producer.setPollNameServerInterval(1000);
        producer.start();
        long begun = System.nanoTime();
        Thread[] workers = new Thread[threads];
        for (int t = 0; t < threads; t++) {
            workers[t] = new Thread(() -> {
                java.util.Random random = new java.util.Random(7);
                for (long i; (i = next.getAndIncrement()) < messages; ) {
                    if (perSecond > 0) {
                        long due = begun + (long) (i / perSecond * 1e9);
                        for (long left; (left = due - System.nanoTime()) > 0; ) {
                            java.util.concurrent.locks.LockSupport.parkNanos(left);
                        }
                    }
                    StringBuilder text = new StringBuilder(bodyBytes + 40);
                    text.append("{\"id\":").append(i).append(",\"text\":\"");
                    while (text.length() < bodyBytes - 2) text.append(Integer.toString(random.nextInt(1 << 20), 36)).append(' ');
                    text.setLength(Math.max(bodyBytes - 2, 10));
                    byte[] body = text.append("\"}").toString().getBytes(StandardCharsets.UTF_8);
                    String topic = "live" + (i % topics);
                    Message message = new Message(topic, "Tag" + i % 5, "key" + i, body);
                    MessageQueue queue = new MessageQueue(topic, broker, (int) (i / topics % queues));
                    while (true) {
                        try {
                            SendResult sent = broker.equals("*") ? producer.send(message) : producer.send(message, queue);
                            if (sent.getSendStatus() == SendStatus.SEND_OK) acked.incrementAndGet();
                            break;
                        } catch (InterruptedException e) {
                            return;
                        } catch (Exception e) {
                            if (failed.incrementAndGet() <= 10) System.err.println(e);
                            try { Thread.sleep(50); } catch (InterruptedException stop) { return; }
                        }
                    }
                }
            });
            workers[t].start();
        }
        Thread reporter = new Thread(() -> {
            try { while (true) { Thread.sleep(1000); System.out.println("ACKED " + acked.get()); } } catch (InterruptedException e) { }
        });
        reporter.setDaemon(true);
        reporter.start();
        for (Thread worker : workers) worker.join();
        System.out.println("DONE " + acked.get() + " " + failed.get());
        producer.shutdown();
    }
}
