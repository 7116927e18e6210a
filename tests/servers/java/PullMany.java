import java.util.*;
import java.util.concurrent.atomic.*;
import org.apache.rocketmq.client.consumer.*;
import org.apache.rocketmq.common.message.*;

/**
 * args: namesrv topics queues count threads batch sinceMs
 * Reads `count` queues of the topics live0, live1, …, spread over all of them, from the first message stored at `sinceMs`
 * to the end they have when the queue's turn comes; each thread reads one queue after the other. Prints one JSON object:
 * messages, pulls, seconds, p50, p99 and the longest of a pull in milliseconds, wrong offsets.
 */
public class PullMany {
    public static void main(String[] a) throws Exception {
        int topics = Integer.parseInt(a[1]), queues = Integer.parseInt(a[2]), count = Integer.parseInt(a[3]);
        int threads = Integer.parseInt(a[4]), batch = Integer.parseInt(a[5]);
        long since = Long.parseLong(a[6]);
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer("G_many");
        consumer.setNamesrvAddr(a[0]);
        consumer.setConsumerPullTimeoutMillis(60_000);
        consumer.start();
        List<MessageQueue> all = new ArrayList<>();
        for (int topic = 0; topic < topics; topic++) {
            List<MessageQueue> found = new ArrayList<>(consumer.fetchSubscribeMessageQueues("live" + topic));
            Collections.sort(found);
            all.addAll(found);
        }
        if (all.size() != topics * queues) throw new IllegalStateException(all.size() + " queues");
        AtomicInteger next = new AtomicInteger();
        LongAdder messages = new LongAdder(), wrong = new LongAdder();
        List<long[]> times = Collections.synchronizedList(new ArrayList<>());
        List<Thread> workers = new ArrayList<>();
        long begun = System.nanoTime();
        for (int t = 0; t < threads; t++) {
            Thread worker = new Thread(() -> {
                long[] mine = new long[1 << 16];
                int n = 0;
                try {
                    for (int one; (one = next.getAndIncrement()) < count; ) {
                        MessageQueue queue = all.get((int) ((long) one * all.size() / count));
                        long offset = consumer.searchOffset(queue, since), end = consumer.maxOffset(queue);
                        while (offset < end) {
                            long began = System.nanoTime();
                            PullResult pulled = consumer.pull(queue, "*", offset, batch);
                            mine[n++] = System.nanoTime() - began;
                            if (pulled.getPullStatus() != PullStatus.FOUND) { wrong.increment(); break; }
                            for (MessageExt message : pulled.getMsgFoundList()) if (message.getQueueOffset() != offset++) wrong.increment();
                            messages.add(pulled.getMsgFoundList().size());
                        }
                    }
                } catch (Exception e) {
                    e.printStackTrace();
                    Runtime.getRuntime().halt(1);
                }
                times.add(Arrays.copyOf(mine, n));
            });
            workers.add(worker);
            worker.start();
        }
        for (Thread worker : workers) worker.join();
        double seconds = (System.nanoTime() - begun) / 1e9;
        long[] sorted = times.stream().flatMapToLong(Arrays::stream).sorted().toArray();
        System.out.printf(Locale.ROOT, "{\"messages\":%d,\"pulls\":%d,\"seconds\":%.3f,\"p50_ms\":%.2f,\"p99_ms\":%.2f,\"worst_ms\":%.2f,\"wrong\":%d}%n",
            messages.sum(), sorted.length, seconds, sorted[sorted.length / 2] / 1e6, sorted[(int) (sorted.length * 0.99)] / 1e6,
            sorted[sorted.length - 1] / 1e6, wrong.sum());
        System.out.flush();
        Runtime.getRuntime().halt(0);
    }
}
