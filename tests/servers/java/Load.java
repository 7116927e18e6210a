import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.atomic.AtomicLongArray;
import java.util.concurrent.locks.LockSupport;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Sends at a steady rate, cheaply, and times every send.
 * args: namesrv broker topics queues messages bodyBytes threads perSecond(0: no limit) batch poolBytes warmUpSeconds
 * Bodies are slices of a random pool: a small pool compresses well. A send carries `batch` messages to one queue.
 * Goes on over broker restarts; a send that failed is not repeated. Prints each second
 *   RATE acked failed p99_us       (p99 of that second's sends)
 * and at the end, or when its standard input closes,
 *   DONE acked failed seconds sends p50_us p99_us p999_us max_us       (sends of the first warmUpSeconds are not timed)
 */
public class Load {
    static final int BUCKETS = 1 << 12;

    /** Two histograms of microseconds, 64 steps a power of two: since the start and since the last second. */
    static final AtomicLongArray TOTAL = new AtomicLongArray(BUCKETS), SECOND = new AtomicLongArray(BUCKETS);
    static final AtomicLong MAX_US = new AtomicLong();

    static int bucket(long us) {
        if (us < 64) return (int) us;
        int exponent = 63 - Long.numberOfLeadingZeros(us);
        return Math.min(BUCKETS - 1, (exponent - 5) * 64 + (int) ((us >> (exponent - 6)) & 63));
    }

    static long value(int bucket) {
        if (bucket < 64) return bucket;
        int exponent = bucket / 64 + 5;
        return (64L + bucket % 64) << (exponent - 6);
    }

    static void record(long us) {
        TOTAL.incrementAndGet(bucket(us));
        SECOND.incrementAndGet(bucket(us));
        MAX_US.accumulateAndGet(us, Math::max);
    }

    static long[] counts(AtomicLongArray from, boolean clear) {
        long[] all = new long[BUCKETS];
        for (int i = 0; i < BUCKETS; i++) all[i] = clear ? from.getAndSet(i, 0) : from.get(i);
        return all;
    }

    static long quantile(long[] counts, double q) {
        long total = 0, seen = 0;
        for (long count : counts) total += count;
        for (int i = 0; i < BUCKETS; i++) {
            seen += counts[i];
            if (total > 0 && seen >= q * total) return value(i);
        }
        return 0;
    }

    public static void main(String[] a) throws Exception {
        String namesrv = a[0], broker = a[1];
        int topics = Integer.parseInt(a[2]), queues = Integer.parseInt(a[3]);
        long messages = Long.parseLong(a[4]);
        int bodyBytes = Integer.parseInt(a[5]), threads = Integer.parseInt(a[6]);
        double perSecond = Double.parseDouble(a[7]);
        int batch = Integer.parseInt(a[8]), poolBytes = Integer.parseInt(a[9]);
        byte[] pool = pool(poolBytes + bodyBytes);
        AtomicLong next = new AtomicLong(), acked = new AtomicLong(), failed = new AtomicLong();
        DefaultMQProducer producer = new DefaultMQProducer("load-producer");
        producer.setNamesrvAddr(namesrv);
        producer.setSendMsgTimeout(3000);
        producer.setRetryTimesWhenSendFailed(0);
        producer.setCompressMsgBodyOverHowmuch(Integer.MAX_VALUE);
        producer.start();
        long begun = System.nanoTime();
        long warmUpNanos = Long.parseLong(a[10]) * 1_000_000_000L;
        Runnable report = () -> {
            long[] all = counts(TOTAL, false);
            long sends = 0;
            for (long count : all) sends += count;
            System.out.println("DONE " + acked.get() + " " + failed.get() + " " + (System.nanoTime() - begun) / 1e9 + " " + sends
                + " " + quantile(all, 0.5) + " " + quantile(all, 0.99) + " " + quantile(all, 0.999) + " " + MAX_US.get());
            System.out.flush();
        };
        Thread[] workers = new Thread[threads];
        for (int t = 0; t < threads; t++) {
            workers[t] = new Thread(() -> work(
                producer, broker, topics, queues, messages, bodyBytes, perSecond, batch, pool, poolBytes, next, acked, failed, begun));
            workers[t].start();
        }
        daemon(() -> {
            for (boolean cold = true; true; ) {
                Thread.sleep(1000);
                if (cold && System.nanoTime() - begun >= warmUpNanos) {
                    cold = false;
                    counts(TOTAL, true);
                    MAX_US.set(0);
                }
                System.out.println("RATE " + acked.get() + " " + failed.get() + " " + quantile(counts(SECOND, true), 0.99));
            }
        });
        daemon(() -> {
            while (System.in.read() >= 0) { }
            next.set(Long.MAX_VALUE / 2);
        });
        for (Thread worker : workers) worker.join();
        report.run();
        System.exit(0);
    }

    interface Work { void run() throws Exception; }

    static void daemon(Work work) {
        Thread thread = new Thread(() -> { try { work.run(); } catch (Exception e) { e.printStackTrace(); } });
        thread.setDaemon(true);
        thread.start();
    }

    static byte[] pool(int bytes) {
        java.util.Random random = new java.util.Random(11);
        StringBuilder text = new StringBuilder(bytes + 8);
        while (text.length() < bytes) text.append(Integer.toString(random.nextInt(1 << 20), 36)).append(' ');
        return text.substring(0, bytes).getBytes(StandardCharsets.US_ASCII);
    }

    static void work(DefaultMQProducer producer, String broker, int topics, int queues, long messages, int bodyBytes, double perSecond,
                     int batch, byte[] pool, int poolBytes, AtomicLong next, AtomicLong acked, AtomicLong failed, long begun) {
        java.util.Random random = new java.util.Random();
        for (long first; (first = next.getAndAdd(batch)) < messages; ) {
            if (perSecond > 0) {
                long due = begun + (long) (first / perSecond * 1e9);
                for (long left; (left = due - System.nanoTime()) > 0; ) LockSupport.parkNanos(left);
            }
            long send = first / batch;
            String topic = "live" + send % topics;
            MessageQueue queue = new MessageQueue(topic, broker, (int) (send / topics % queues));
            List<Message> all = new ArrayList<>(batch);
            for (long i = first; i < Math.min(messages, first + batch); i++) {
                byte[] id = ("{\"id\":" + i + "} ").getBytes(StandardCharsets.US_ASCII);
                byte[] body = new byte[Math.max(bodyBytes, id.length)];
                System.arraycopy(id, 0, body, 0, id.length);
                System.arraycopy(pool, random.nextInt(poolBytes), body, id.length, body.length - id.length);
                all.add(new Message(topic, "Tag" + i % 5, "key" + i, body));
            }
            long began = System.nanoTime();
            try {
                boolean ok = (batch == 1 ? producer.send(all.get(0), queue) : producer.send(all, queue)).getSendStatus() == SendStatus.SEND_OK;
                if (ok) acked.addAndGet(all.size());
                record((System.nanoTime() - began) / 1000);
            } catch (InterruptedException e) {
                return;
            } catch (Exception e) {
                failed.addAndGet(all.size());
                LockSupport.parkNanos(50_000_000L);
            }
        }
    }
}
