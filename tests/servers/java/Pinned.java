import java.io.PrintWriter;
import java.util.*;
import java.util.zip.CRC32;
import org.apache.rocketmq.acl.common.*;
import org.apache.rocketmq.client.consumer.*;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.*;
import org.apache.rocketmq.remoting.RPCHook;

/**
 * A consumer whose broker id is set by its user: it never asks another one while that id is in the route.
 * args: namesrv mode group topic brokerId wanted idleSeconds output
 * mode: assign (lite pull, begins where its group is, else at offset 0), pull (the pull API, from offset 0). Ends when wanted
 * messages came, or none for idleSeconds.
 * output: one line a message: queueId offset bodyCrc32 bodyLength uniqKey. -Dacl.key and -Dacl.secret: it signs.
 */
public class Pinned {
    static long count;
    static PrintWriter out;

    public static void main(String[] a) throws Exception {
        out = new PrintWriter(a[7], "UTF-8");
        long wanted = Long.parseLong(a[5]), idle = Long.parseLong(a[6]) * 1000, id = Long.parseLong(a[4]);
        if (a[1].equals("pull")) pull(a, id, wanted);
        else assign(a, id, wanted, idle);
        out.close();
        System.out.println("consumed " + count);
        System.exit(0);
    }

    static RPCHook hook() {
        String key = System.getProperty("acl.key");
        return key == null ? null : new AclClientRPCHook(new SessionCredentials(key, System.getProperty("acl.secret")));
    }

    static void took(List<MessageExt> messages) {
        for (MessageExt m : messages) {
            CRC32 crc = new CRC32();
            crc.update(m.getBody());
            out.println(m.getQueueId() + " " + m.getQueueOffset() + " " + crc.getValue() + " " + m.getBody().length + " "
                + m.getProperty("UNIQ_KEY"));
        }
        out.flush();
        count += messages.size();
    }

    static void assign(String[] a, long id, long wanted, long idle) throws Exception {
        DefaultLitePullConsumer c = new DefaultLitePullConsumer(a[2], hook());
        c.setNamesrvAddr(a[0]);
        c.setPollNameServerInterval(1000);
        c.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        c.setAutoCommitIntervalMillis(1000);
        c.start();
        c.setConnectBrokerByUser(true);
        c.setDefaultBrokerId(id);
        c.assign(c.fetchMessageQueues(a[3]));
        long last = System.currentTimeMillis();
        while (count < wanted && System.currentTimeMillis() - last < idle) {
            List<MessageExt> found = c.poll(500);
            if (found.isEmpty()) continue;
            took(found);
            last = System.currentTimeMillis();
        }
        c.commitSync();
        Thread.sleep(1500);
        c.shutdown();
    }

    static void pull(String[] a, long id, long wanted) throws Exception {
        DefaultMQPullConsumer c = new DefaultMQPullConsumer(a[2], hook());
        c.setNamesrvAddr(a[0]);
        c.start();
        c.getDefaultMQPullConsumerImpl().getPullAPIWrapper().setConnectBrokerByUser(true);
        c.getDefaultMQPullConsumerImpl().getPullAPIWrapper().setDefaultBrokerId(id);
        for (MessageQueue q : c.fetchSubscribeMessageQueues(a[3])) {
            long offset = 0, end = c.maxOffset(q);
            while (offset < end) {
                PullResult found = c.pull(q, "*", offset, 32);
                if (found.getPullStatus() == PullStatus.FOUND) took(found.getMsgFoundList());
                if (found.getNextBeginOffset() <= offset) throw new IllegalStateException("no progress: " + found);
                offset = found.getNextBeginOffset();
            }
        }
        c.shutdown();
    }
}
