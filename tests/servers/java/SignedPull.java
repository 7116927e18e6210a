import java.util.*;
import org.apache.rocketmq.acl.common.*;
import org.apache.rocketmq.client.consumer.*;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.common.message.*;
import org.apache.rocketmq.remoting.RPCHook;

/**
 * args: namesrv group topic [accessKey secretKey]
 * Pulls all queues of a topic from 0. Prints "pulled N", or "refused CODE" for what the broker answered.
 */
public class SignedPull {
    public static void main(String[] a) throws Exception {
        RPCHook hook = a.length > 3 ? new AclClientRPCHook(new SessionCredentials(a[3], a[4])) : null;
        DefaultMQPullConsumer c = new DefaultMQPullConsumer(a[1], hook);
        c.setNamesrvAddr(a[0]);
        c.start();
        String word;
        try {
            word = "pulled " + pull(c, a[2]);
        } catch (Exception e) {
            Throwable cause = e;
            while (!(cause instanceof MQBrokerException) && cause.getCause() != null) cause = cause.getCause();
            word = cause instanceof MQBrokerException ? "refused " + ((MQBrokerException) cause).getResponseCode()
                : "failed " + String.valueOf(cause).split("\n")[0];
        }
        c.shutdown();
        System.out.println(word);
        System.exit(0);
    }

    static int pull(DefaultMQPullConsumer c, String topic) throws Exception {
        int count = 0;
        for (MessageQueue mq : c.fetchSubscribeMessageQueues(topic)) {
            long offset = 0;
            while (true) {
                PullResult r = c.pull(mq, "*", offset, 32);
                if (r.getPullStatus() == PullStatus.NO_NEW_MSG || r.getPullStatus() == PullStatus.OFFSET_ILLEGAL) break;
                if (r.getPullStatus() == PullStatus.FOUND) count += r.getMsgFoundList().size();
                offset = r.getNextBeginOffset();
            }
        }
        return count;
    }
}
