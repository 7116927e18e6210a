import java.nio.file.*;
import java.util.*;
import java.util.concurrent.atomic.*;
import org.apache.rocketmq.client.consumer.*;
import org.apache.rocketmq.common.message.*;

/**
 * args: namesrv mode(pull, lite) topic queues batch endOffset warmSeconds seconds serverPid
 * Reads [0, endOffset) of every queue again and again, a thread a queue. Prints one JSON object: messages, seconds,
 * CPU seconds of the server meanwhile, p50 and p99 of a pull in microseconds (pull mode; lite pulls by itself, before
 * it is asked), wrong offsets.
 */
public class PullSpeed {
    static final LongAdder messages = new LongAdder(), wrong = new LongAdder();
    static volatile boolean measuring, stop;

    static double cpu(String pid) throws Exception {
        String s = new String(Files.readAllBytes(Paths.get("/proc/" + pid + "/stat")));
        String[] f = s.substring(s.lastIndexOf(')') + 2).split(" ");
        return (Long.parseLong(f[11]) + Long.parseLong(f[12])) / 100.0;
    }

    public static void main(String[] a) throws Exception {
        String topic = a[2];
        int queues = Integer.parseInt(a[3]), batch = Integer.parseInt(a[4]);
        long end = Long.parseLong(a[5]);
        List<long[]> times = Collections.synchronizedList(new ArrayList<>());
        if (a[1].equals("pull")) {
            DefaultMQPullConsumer c = new DefaultMQPullConsumer("G_speed_pull");
            c.setNamesrvAddr(a[0]);
            c.start();
            List<MessageQueue> mqs = new ArrayList<>(c.fetchSubscribeMessageQueues(topic));
            Collections.sort(mqs);
            for (MessageQueue mq : mqs.subList(0, queues)) {
                start(() -> {
                    long[] mine = new long[1 << 20];
                    int n = 0;
                    long offset = 0;
                    while (!stop) {
                        long t = System.nanoTime();
                        PullResult r = c.pull(mq, "*", offset, batch);
                        if (measuring && n < mine.length) mine[n++] = System.nanoTime() - t;
                        if (r.getPullStatus() != PullStatus.FOUND) { wrong.increment(); offset = 0; continue; }
                        for (MessageExt m : r.getMsgFoundList()) if (m.getQueueOffset() != offset++) wrong.increment();
                        messages.add(r.getMsgFoundList().size());
                        if (offset >= end) offset = 0;
                    }
                    times.add(Arrays.copyOf(mine, n));
                });
            }
        } else {
            DefaultLitePullConsumer c = new DefaultLitePullConsumer("G_speed_lite");
            c.setNamesrvAddr(a[0]);
            c.setAutoCommit(false);
            c.setPullBatchSize(batch);
            c.setPullThreadNums(queues);
            c.start();
            List<MessageQueue> mqs = new ArrayList<>(c.fetchMessageQueues(topic));
            mqs.sort(Comparator.comparingInt(MessageQueue::getQueueId));
            List<MessageQueue> own = mqs.subList(0, queues);
            c.assign(own);
            for (MessageQueue mq : own) c.seek(mq, 0);
            start(() -> {
                // Behind a seek what had been fetched before it may still come, and is not counted. A pull under way may
                // even undo the seek; then it is repeated.
                long[] next = new long[queues], sought = new long[queues];
                while (!stop) {
                    for (MessageExt m : c.poll(20)) {
                        int queue = m.getQueueId();
                        if (m.getQueueOffset() == next[queue]) {
                            messages.increment();
                            next[queue]++;
                        } else if (next[queue] != 0) {
                            wrong.increment();
                        }
                    }
                    long now = System.nanoTime();
                    for (int queue = 0; queue < queues; queue++) {
                        boolean over = next[queue] >= end;
                        if (over || next[queue] == 0 && now - sought[queue] > 100_000_000L) {
                            next[queue] = 0;
                            sought[queue] = now;
                            c.seek(own.get(queue), 0);
                        }
                    }
                }
            });
        }
        Thread.sleep((long) (Double.parseDouble(a[6]) * 1000));
        measuring = true;
        long m0 = messages.sum(), t0 = System.nanoTime();
        double c0 = cpu(a[8]);
        Thread.sleep((long) (Double.parseDouble(a[7]) * 1000));
        long m = messages.sum() - m0;
        double seconds = (System.nanoTime() - t0) / 1e9, used = cpu(a[8]) - c0;
        stop = true;
        Thread.sleep(500);
        long[] all = times.stream().flatMapToLong(Arrays::stream).sorted().toArray();
        String p = all.length == 0 ? "null,\"p99_us\":null" : all[all.length / 2] / 1000.0 + ",\"p99_us\":"
            + all[(int) (all.length * 0.99)] / 1000.0;
        System.out.printf(Locale.ROOT, "{\"messages\":%d,\"seconds\":%.3f,\"server_cpu_s\":%.2f,\"wrong\":%d,\"p50_us\":%s}%n",
            m, seconds, used, wrong.sum(), p);
        System.out.flush();
        Runtime.getRuntime().halt(0);
    }

    interface Work { void run() throws Exception; }

    static void start(Work work) {
        Thread t = new Thread(() -> {
            try {
                work.run();
            } catch (Exception e) {
                if (!stop) { e.printStackTrace(); Runtime.getRuntime().halt(1); }
            }
        });
        t.setDaemon(true);
        t.start();
    }
}
