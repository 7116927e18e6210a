import java.io.PrintWriter;
import java.nio.file.*;
import java.util.*;
import org.apache.rocketmq.client.consumer.*;
import org.apache.rocketmq.client.producer.*;
import org.apache.rocketmq.common.message.*;

/**
 * args: namesrv read broker input output: everything of each queue of input (a line "topic queueId").
 *       output: a line "queue topic queueId min max", then one a message: "topic queueId offset commitLogOffset storeTimestamp".
 * or:   namesrv send broker topic queueId count: prints the queue offset of each message, one a line.
 */
public class Queues {
    public static void main(String[] a) throws Exception {
        int code = 0;
        try {
            if (a[1].equals("send")) send(a);
            else read(a);
        } catch (Throwable e) {
            e.printStackTrace();
            code = 1;
        }
        System.exit(code); // the client's threads would stay
    }

    static void send(String[] a) throws Exception {
        DefaultMQProducer p = new DefaultMQProducer("G_queues");
        p.setNamesrvAddr(a[0]);
        p.setSendMsgTimeout(20000);
        p.start();
        MessageQueue queue = new MessageQueue(a[3], a[2], Integer.parseInt(a[4]));
        for (int i = 0; i < Integer.parseInt(a[5]); i++)
            System.out.println(p.send(new Message(a[3], ("more " + i).getBytes()), queue).getQueueOffset());
        p.shutdown();
    }

    static void read(String[] a) throws Exception {
        DefaultMQPullConsumer c = new DefaultMQPullConsumer("G_queues");
        c.setNamesrvAddr(a[0]);
        c.start();
        for (int left = 60; ; left--) { // until the broker has registered
            try {
                c.fetchSubscribeMessageQueues("t_one");
                break;
            } catch (Exception e) {
                if (left == 0) throw e;
                Thread.sleep(1000);
            }
        }
        PrintWriter out = new PrintWriter(a[4], "UTF-8");
        for (String line : Files.readAllLines(Paths.get(a[3]))) {
            String[] f = line.split(" ");
            MessageQueue queue = new MessageQueue(f[0], a[2], Integer.parseInt(f[1]));
            long offset = c.minOffset(queue), end = c.maxOffset(queue);
            out.println("queue " + line + " " + offset + " " + end);
            while (offset < end) {
                PullResult found = c.pull(queue, "*", offset, 32);
                long place = offset; // in an LMQ; the record has its parent's offset
                if (found.getPullStatus() == PullStatus.FOUND)
                    for (MessageExt m : found.getMsgFoundList())
                        out.println(line + " " + (f[0].startsWith("%LMQ%") ? place++ : m.getQueueOffset()) + " "
                            + m.getCommitLogOffset() + " " + m.getStoreTimestamp());
                if (found.getNextBeginOffset() <= offset) throw new IllegalStateException(line + " at " + offset + ": " + found);
                offset = found.getNextBeginOffset();
            }
        }
        out.close();
        c.shutdown();
    }
}
