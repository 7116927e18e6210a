import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/** args: namesrv brokerAddress create|delete cluster topic queues */
public class Admin {
    public static void main(String[] a) {
        try {
            act(a);
            System.out.println("OK");
            System.exit(0);
        } catch (Exception e) {
            e.printStackTrace();
            System.exit(1);
        }
    }

    static void act(String[] a) throws Exception {
        DefaultMQAdminExt admin = new DefaultMQAdminExt(10000);
        admin.setNamesrvAddr(a[0]);
        admin.start();
        if (a[2].equals("create")) {
            TopicConfig topic = new TopicConfig(a[4]);
            topic.setReadQueueNums(Integer.parseInt(a[5]));
            topic.setWriteQueueNums(Integer.parseInt(a[5]));
            topic.setPerm(6);
            admin.createAndUpdateTopicConfig(a[1], topic);
        } else {
            admin.deleteTopicInBroker(java.util.Set.of(a[1]), a[4]);
            admin.deleteTopicInNameServer(java.util.Set.of(a[0]), a[3], a[4]);
        }
        admin.shutdown();
    }
}
