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
            awaitRoute(admin, a[4]);
        } else {
            admin.deleteTopicInBroker(java.util.Set.of(a[1]), a[4]);
            admin.deleteTopicInNameServer(java.util.Set.of(a[0]), a[3], a[4]);
        }
        admin.shutdown();
    }

    /** A name server may refuse a broker's first registration; the next one comes seconds later. */
    static void awaitRoute(DefaultMQAdminExt admin, String topic) throws InterruptedException {
        for (int tries = 0; tries < 150; tries++) {
            try {
                admin.examineTopicRouteInfo(topic);
                return;
            } catch (Exception e) {
                Thread.sleep(200);
            }
        }
    }
}
