import java.lang.reflect.Constructor;
import java.net.InetSocketAddress;
import java.util.*;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.common.*;
import org.apache.rocketmq.common.message.*;
import org.apache.rocketmq.store.*;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.apache.rocketmq.store.stats.BrokerStatsManager;

/**
 * A broker's own message store (4.9 or 5.x, without the broker around it): stores records that name light queues, and
 * says what each queue then holds. How the stores L, M, N and O of tests/data/stores were made: tests/data/stores/light.sh.
 * args: directory, key=value... of MessageStoreConfig, "--", records "topic/queue id/delay level/names[/offsets]" or
 * "?topic/queue id" for what a queue holds; a name's "/" is written as "|". Prints one JSON line a unit:
 * [topic, queue id, queue offset, physical offset].
 */
public class LightStore {
    static int number;

    public static void main(String[] a) throws Exception {
        MessageStoreConfig c = new MessageStoreConfig();
        c.setStorePathRootDir(a[0]);
        c.setMappedFileSizeCommitLog(64 << 10);
        c.setMappedFileSizeConsumeQueue(2000);
        c.setHaListenPort(0);
        c.setMaxHashSlotNum(10);
        c.setMaxIndexNum(40);
        Properties p = new Properties();
        int at = 1;
        for (; !a[at].equals("--"); at++) p.put(a[at].split("=")[0], a[at].split("=")[1]);
        MixAll.properties2Object(p, c);
        MessageStore s = store(c, p.getProperty("storeType", "").equals("defaultRocksDB"));
        s.load();
        s.start();
        while (s.dispatchBehindBytes() > 0) Thread.sleep(50);
        number = (int) s.getMaxPhyOffset();
        List<String> asked = new ArrayList<>();
        for (at++; at < a.length; at++) {
            if (a[at].startsWith("?")) asked.add(a[at].substring(1));
            else put(s, a[at].split("/"));
        }
        for (int i = 0; i < 100 && (i < 10 || s.dispatchBehindBytes() > 0); i++) Thread.sleep(100);
        for (String queue : asked) {
            String topic = queue.substring(0, queue.lastIndexOf('/')).replace('|', '/');
            int id = Integer.parseInt(queue.substring(queue.lastIndexOf('/') + 1));
            for (long offset = 0; offset < s.getMaxOffsetInQueue(topic, id); offset++) {
                long phys = s.getCommitLogOffsetInQueue(topic, id, offset);
                MessageExt found = phys < 0 ? null : s.lookMessageByOffset(phys);
                if (found != null && (phys > 0 || offset == 0))
                    System.out.println("[\"" + topic + "\", " + id + ", " + offset + ", " + phys + "]");
            }
        }
        s.shutdown();
        Runtime.getRuntime().halt(0);
    }

    static MessageStore store(MessageStoreConfig c, boolean isRocksdb) throws Exception {
        MessageArrivingListener none = (t, q, o, g, ts, f, pp) -> { };
        Object[] all = {c, new BrokerStatsManager("c", false), none, new BrokerConfig(), new ConcurrentHashMap<>()};
        Class<?> kind = Class.forName("org.apache.rocketmq.store." + (isRocksdb ? "RocksDBMessageStore" : "DefaultMessageStore"));
        Constructor<?> made = kind.getConstructors()[0];
        return (MessageStore) made.newInstance(Arrays.copyOf(all, made.getParameterCount()));
    }

    static void put(MessageStore s, String[] r) {
        MessageExtBrokerInner m = new MessageExtBrokerInner();
        m.setTopic(r[0]);
        m.setQueueId(Integer.parseInt(r[1]));
        m.setBody(("body " + number++).getBytes());
        m.setBornTimestamp(System.currentTimeMillis());
        m.setBornHost(new InetSocketAddress("127.0.0.1", 1));
        m.setStoreHost(new InetSocketAddress("127.0.0.1", 2));
        MessageAccessor.putProperty(m, "KEYS", "k" + number);
        if (r.length > 3) MessageAccessor.putProperty(m, "INNER_MULTI_DISPATCH", r[3].replace('|', '/'));
        if (r.length > 4) MessageAccessor.putProperty(m, "INNER_MULTI_QUEUE_OFFSET", r[4]);
        if (!r[2].equals("0")) m.setDelayTimeLevel(Integer.parseInt(r[2]));
        m.setPropertiesString(MessageDecoder.messageProperties2String(m.getProperties()));
        PutMessageStatus status = s.putMessage(m).getPutMessageStatus();
        if (status != PutMessageStatus.PUT_OK) throw new IllegalStateException(r[0] + " " + status);
    }
}
