import java.io.PrintWriter;
import java.nio.file.*;
import java.util.*;
import java.util.concurrent.atomic.AtomicLong;
import java.util.zip.CRC32;
import org.apache.rocketmq.acl.common.*;
import org.apache.rocketmq.client.consumer.*;
import org.apache.rocketmq.client.consumer.listener.*;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.*;
import org.apache.rocketmq.remoting.RPCHook;

/**
 * args: namesrv mode group topic expression wanted idleSeconds output [failures [maxReconsumeTimes]]
 * or:   namesrv @file, a job a line of the same arguments from mode on, tab-separated, all at once.
 * mode: push, pop (a push consumer that lets the broker share queues out), broadcast, orderly, lite, assign, pull. Ends when wanted messages came, or none for idleSeconds.
 * A message consumed fewer than failures times before is given back, to come again after a second.
 * output: one line a message: queueId offset bodyCrc32 bodyLength uniqKey tags storeTimestamp reconsumeTimes
 *         outcome(ok, back) topic RETRY_TOPIC ORIGIN_MESSAGE_ID msgId
 * With -Dconsume.everything=true one field more: all that a message says of itself, URL-encoded.
 * With -Dconsume.access.key and -Dconsume.secret.key push and orderly consumers sign their requests.
 * With -Dconsume.pause.ms=n push and orderly consumers take n ms for a message; with -Dconsume.pause.while=file only
 * as long as the file exists.
 * With -Dconsume.pull.size=n push and orderly consumers pull n messages at once, and no more while they hold n.
 * mode light: the pull API on a light queue, whose parent topic is the expression.
 */
public class Consume {
    final AtomicLong count = new AtomicLong();
    volatile long last = System.currentTimeMillis();
    final String[] a;
    final PrintWriter out;
    final int failures;

    Consume(String[] a) throws Exception {
        this.a = a;
        out = new PrintWriter(a[7], "UTF-8");
        failures = a.length > 8 ? Integer.parseInt(a[8]) : 0;
    }

    public static void main(String[] a) throws Exception {
        Thread.setDefaultUncaughtExceptionHandler((t, e) -> e.printStackTrace());
        List<Consume> jobs = new ArrayList<>();
        if (a[1].startsWith("@")) {
            for (String line : Files.readAllLines(Paths.get(a[1].substring(1)))) {
                jobs.add(new Consume((a[0] + "\t" + line).split("\t")));
            }
        } else {
            jobs.add(new Consume(a));
        }
        List<Thread> threads = new ArrayList<>();
        AtomicLong failed = new AtomicLong();
        for (Consume job : jobs) {
            Thread thread = new Thread(() -> {
                try {
                    job.run();
                } catch (Throwable e) {
                    e.printStackTrace();
                    failed.incrementAndGet();
                }
            });
            thread.start();
            threads.add(thread);
        }
        for (Thread thread : threads) thread.join();
        System.exit(failed.get() == 0 ? 0 : 1);
    }

    void run() throws Exception {
        long wanted = Long.parseLong(a[5]), idle = Long.parseLong(a[6]) * 1000;
        Runnable stop = start();
        while (count.get() < wanted && System.currentTimeMillis() - last < idle) Thread.sleep(50);
        Thread.sleep(500);
        stop.run();
        out.close();
        System.out.println("consumed " + count.get());
    }

    static final boolean EVERYTHING = Boolean.getBoolean("consume.everything");

    /** The clients' own is 3 s, after which starting fails: too little where the whole test shares two busy cores. */
    static final int API_TIMEOUT_MS = 15000;

    static final long PAUSE_MS = Long.getLong("consume.pause.ms", 0);
    static final String PAUSE_WHILE = System.getProperty("consume.pause.while");
    static final int PULL_SIZE = Integer.getInteger("consume.pull.size", 0);

    /** Signs requests with -Dconsume.access.key and -Dconsume.secret.key, if given. */
    static RPCHook hook() {
        String key = System.getProperty("consume.access.key"), secret = System.getProperty("consume.secret.key");
        return key == null ? null : new AclClientRPCHook(new SessionCredentials(key, secret));
    }

    static void pause() {
        try {
            if (PAUSE_MS > 0 && (PAUSE_WHILE == null || Files.exists(Paths.get(PAUSE_WHILE)))) Thread.sleep(PAUSE_MS);
        } catch (InterruptedException e) {
            Thread.currentThread().interrupt();
        }
    }

    /** What the broker stored, without what clients add when they get it; a 5.x client clears "compressed". */
    static String everything(MessageExt m) {
        Map<String, String> properties = new TreeMap<>(m.getProperties());
        for (String added : new String[] {"MIN_OFFSET", "MAX_OFFSET", "CONSUME_START_TIME"}) properties.remove(added);
        String all = properties + "|" + m.getFlag() + "|" + (m.getSysFlag() & ~1) + "|" + m.getBornTimestamp() + "|" + m.getBornHost()
            + "|" + m.getStoreHost() + "|" + m.getCommitLogOffset() + "|" + m.getStoreSize() + "|" + m.getBodyCRC()
            + "|" + m.getPreparedTransactionOffset();
        try {
            return java.net.URLEncoder.encode(all, "UTF-8");
        } catch (java.io.UnsupportedEncodingException e) {
            throw new IllegalStateException(e);
        }
    }

    /** Whether all are consumed; otherwise they are to come again. */
    synchronized boolean took(List<? extends MessageExt> messages) {
        boolean ok = true;
        for (MessageExt m : messages) ok &= m.getReconsumeTimes() >= failures;
        for (MessageExt m : messages) {
            CRC32 crc = new CRC32();
            byte[] body = m.getBody() == null ? new byte[0] : m.getBody();
            crc.update(body);
            out.println(m.getQueueId() + " " + m.getQueueOffset() + " " + crc.getValue() + " " + body.length + " "
                + m.getProperty("UNIQ_KEY") + " " + m.getTags() + " " + m.getStoreTimestamp() + " "
                + m.getReconsumeTimes() + " " + (ok ? "ok" : "back") + " " + m.getTopic() + " "
                + m.getProperty("RETRY_TOPIC") + " " + m.getProperty("ORIGIN_MESSAGE_ID") + " " + m.getMsgId()
                + (EVERYTHING ? " " + everything(m) : ""));
        }
        out.flush();
        if (ok) count.addAndGet(messages.size());
        last = System.currentTimeMillis();
        return ok;
    }

    Runnable start() throws Exception {
        String mode = a[1], group = a[2], topic = a[3], expression = a[4];
        if (mode.equals("lite") || mode.equals("assign")) return lite(a[0], mode, group, topic, expression);
        if (mode.equals("pull")) return pull(a[0], group, topic, expression);
        if (mode.equals("light")) return light(a[0], group, topic, expression);
        DefaultMQPushConsumer c = new DefaultMQPushConsumer(group, hook(), new AllocateMessageQueueAveragely());
        c.setNamesrvAddr(a[0]);
        c.setMqClientApiTimeout(API_TIMEOUT_MS);
        c.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        c.setPollNameServerInterval(1000);
        c.setPersistConsumerOffsetInterval(500);
        if (PULL_SIZE > 0) {
            c.setPullBatchSize(PULL_SIZE);
            c.setPullThresholdForQueue(PULL_SIZE);
        }
        if (a.length > 9) c.setMaxReconsumeTimes(Integer.parseInt(a[9]));
        if (mode.equals("broadcast")) broadcast(c);
        if (mode.equals("pop")) c.getClass().getMethod("setClientRebalance", boolean.class).invoke(c, false); // 5.x
        if (expression.startsWith("sql:")) c.subscribe(topic, MessageSelector.bySql(expression.substring(4)));
        else c.subscribe(topic, expression);
        if (mode.equals("orderly")) {
            c.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
                pause();
                took(messages);
                return ConsumeOrderlyStatus.SUCCESS;
            });
        } else {
            c.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                pause();
                context.setDelayLevelWhenNextConsume(mode.equals("pop") ? 0 : 1); // 10 s when popped, else 1 s
                return took(messages) ? ConsumeConcurrentlyStatus.CONSUME_SUCCESS
                    : ConsumeConcurrentlyStatus.RECONSUME_LATER;
            });
        }
        c.start();
        return c::shutdown;
    }

    /** MessageModel moved to another package between 4.9 and 5: found through the setter. */
    @SuppressWarnings({"unchecked", "rawtypes"})
    static void broadcast(DefaultMQPushConsumer c) throws Exception {
        Class type = c.getMessageModel().getClass();
        DefaultMQPushConsumer.class.getMethod("setMessageModel", type).invoke(c, Enum.valueOf(type, "BROADCASTING"));
    }

    Runnable lite(String name, String mode, String group, String topic, String expression) throws Exception {
        DefaultLitePullConsumer c = new DefaultLitePullConsumer(group);
        c.setNamesrvAddr(name);
        c.setMqClientApiTimeout(API_TIMEOUT_MS);
        c.setAutoCommit(true);
        c.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        c.setAutoCommitIntervalMillis(1000);
        if (mode.equals("lite")) c.subscribe(topic, expression);
        c.start();
        if (mode.equals("assign")) {
            Collection<MessageQueue> queues = c.fetchMessageQueues(topic);
            // No seek: one that overtakes the first pull loses that pull's messages in 5.5.0's client.
            c.assign(queues);
        }
        Thread polls = new Thread(() -> {
            while (true) {
                List<MessageExt> found = c.poll(500);
                if (!found.isEmpty()) took(found);
            }
        });
        polls.setDaemon(true);
        polls.start();
        return c::shutdown;
    }

    Runnable pull(String name, String group, String topic, String expression) throws Exception {
        DefaultMQPullConsumer c = new DefaultMQPullConsumer(group);
        c.setNamesrvAddr(name);
        c.setMqClientApiTimeout(API_TIMEOUT_MS);
        c.start();
        for (MessageQueue q : c.fetchSubscribeMessageQueues(topic)) pullAll(c, q, expression);
        return c::shutdown;
    }

    /** A light queue has no route: its broker is its parent's. */
    Runnable light(String name, String group, String topic, String parent) throws Exception {
        DefaultMQPullConsumer c = new DefaultMQPullConsumer(group);
        c.setNamesrvAddr(name);
        c.setMqClientApiTimeout(API_TIMEOUT_MS);
        c.start();
        MessageQueue any = c.fetchSubscribeMessageQueues(parent).iterator().next();
        c.minOffset(any); // now it knows the broker's address
        pullAll(c, new MessageQueue(topic, any.getBrokerName(), 0), "*");
        return c::shutdown;
    }

    void pullAll(DefaultMQPullConsumer c, MessageQueue q, String expression) throws Exception {
        long offset = c.minOffset(q), end = c.maxOffset(q);
        while (offset < end) {
            PullResult found = c.pull(q, expression, offset, 32);
            if (found.getPullStatus() == PullStatus.FOUND) took(found.getMsgFoundList());
            if (found.getNextBeginOffset() <= offset) throw new IllegalStateException("no progress: " + found);
            offset = found.getNextBeginOffset();
        }
    }
}
