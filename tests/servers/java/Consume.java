import java.io.PrintWriter;
import java.util.*;
import java.util.concurrent.atomic.AtomicLong;
import java.util.zip.CRC32;
import org.apache.rocketmq.client.consumer.*;
import org.apache.rocketmq.client.consumer.listener.*;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.*;

/**
 * args: namesrv mode group topic expression wanted idleSeconds output
 * mode: push, broadcast, orderly, lite, assign, pull. Ends when wanted messages came, or none for idleSeconds.
 * output: one line a message: queueId offset bodyCrc32 bodyLength uniqKey tags storeTimestamp reconsumeTimes
 */
public class Consume {
    static final AtomicLong count = new AtomicLong();
    static volatile long last = System.currentTimeMillis();
    static PrintWriter out;

    public static void main(String[] a) throws Exception {
        out = new PrintWriter(a[7], "UTF-8");
        long wanted = Long.parseLong(a[5]), idle = Long.parseLong(a[6]) * 1000;
        Thread.setDefaultUncaughtExceptionHandler((t, e) -> e.printStackTrace());
        Runnable stop = start(a);
        while (count.get() < wanted && System.currentTimeMillis() - last < idle) Thread.sleep(50);
        Thread.sleep(500);
        stop.run();
        out.close();
        System.out.println("consumed " + count.get());
        System.exit(0);
    }

    static synchronized void took(List<? extends MessageExt> messages) {
        for (MessageExt m : messages) {
            CRC32 crc = new CRC32();
            byte[] body = m.getBody() == null ? new byte[0] : m.getBody();
            crc.update(body);
            out.println(m.getQueueId() + " " + m.getQueueOffset() + " " + crc.getValue() + " " + body.length + " "
                + m.getProperty("UNIQ_KEY") + " " + m.getTags() + " " + m.getStoreTimestamp() + " "
                + m.getReconsumeTimes());
        }
        out.flush();
        count.addAndGet(messages.size());
        last = System.currentTimeMillis();
    }

    static Runnable start(String[] a) throws Exception {
        String mode = a[1], group = a[2], topic = a[3], expression = a[4];
        if (mode.equals("lite") || mode.equals("assign")) return lite(a[0], mode, group, topic, expression);
        if (mode.equals("pull")) return pull(a[0], group, topic, expression);
        DefaultMQPushConsumer c = new DefaultMQPushConsumer(group);
        c.setNamesrvAddr(a[0]);
        c.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        c.setPollNameServerInterval(1000);
        c.setPersistConsumerOffsetInterval(500);
        if (mode.equals("broadcast")) broadcast(c);
        if (expression.startsWith("sql:")) c.subscribe(topic, MessageSelector.bySql(expression.substring(4)));
        else c.subscribe(topic, expression);
        if (mode.equals("orderly")) {
            c.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
                took(messages);
                return ConsumeOrderlyStatus.SUCCESS;
            });
        } else {
            c.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                took(messages);
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
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

    static Runnable lite(String name, String mode, String group, String topic, String expression) throws Exception {
        DefaultLitePullConsumer c = new DefaultLitePullConsumer(group);
        c.setNamesrvAddr(name);
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

    static Runnable pull(String name, String group, String topic, String expression) throws Exception {
        DefaultMQPullConsumer c = new DefaultMQPullConsumer(group);
        c.setNamesrvAddr(name);
        c.start();
        for (MessageQueue q : c.fetchSubscribeMessageQueues(topic)) {
            long offset = c.minOffset(q), end = c.maxOffset(q);
            while (offset < end) {
                PullResult found = c.pull(q, expression, offset, 32);
                if (found.getPullStatus() == PullStatus.FOUND) took(found.getMsgFoundList());
                if (found.getNextBeginOffset() <= offset) throw new IllegalStateException("no progress: " + found);
                offset = found.getNextBeginOffset();
            }
        }
        return c::shutdown;
    }
}
