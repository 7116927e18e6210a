import java.io.*;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.*;
import java.util.*;
import java.util.zip.CRC32;
import org.apache.rocketmq.common.message.*;
import org.apache.rocketmq.remoting.netty.*;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;

/**
 * args: broker file output. Pulls every message of the queues that the file lists (topic TAB queue id), and writes
 * "Q topic queue min max", then "M offset phys size crc32" of each of its records, tab-separated. A record must decode.
 */
public class Pulled {
    static NettyRemotingClient client;
    static String broker;

    public static void main(String[] a) throws Exception {
        broker = a[0];
        client = new NettyRemotingClient(new NettyClientConfig());
        client.start();
        try (PrintWriter out = new PrintWriter(a[2], "UTF-8")) {
            for (String line : Files.readAllLines(Paths.get(a[1]), StandardCharsets.UTF_8)) {
                String[] queue = line.split("\t");
                pull(out, queue[0], queue[1]);
            }
        }
        client.shutdown();
        System.exit(0);
    }

    static void pull(PrintWriter out, String topic, String queue) throws Exception {
        long min = number(call(31, "topic", topic, "queueId", queue), "offset");
        long max = number(call(30, "topic", topic, "queueId", queue), "offset");
        out.println("Q\t" + topic + "\t" + queue + "\t" + min + "\t" + max);
        int idle = 0;
        for (long offset = min; offset < max; ) {
            RemotingCommand r = call(11, "consumerGroup", "PULLED", "topic", topic, "queueId", queue, "queueOffset", offset,
                "maxMsgNums", 1000, "sysFlag", 4, "commitOffset", 0, "suspendTimeoutMillis", 0, "subscription", "*",
                "subVersion", 0, "expressionType", "TAG");
            long next = number(r, "nextBeginOffset");
            if (r.getCode() == 0) idle = 0;
            if (r.getCode() == 0) {
                List<ByteBuffer> records = split(r.getBody());
                boolean consecutive = next == offset + records.size();
                for (int i = 0; i < records.size(); i++) {
                    ByteBuffer record = records.get(i);
                    MessageExt m = MessageDecoder.decode(record.duplicate(), true, true, false);
                    CRC32 crc = new CRC32();
                    crc.update(record.duplicate());
                    out.println("M\t" + (consecutive ? offset + i : m.getQueueOffset()) + "\t" + m.getCommitLogOffset() + "\t"
                        + m.getStoreSize() + "\t" + crc.getValue());
                }
            } else if (next <= offset) {
                if (idle++ == 20) throw new IllegalStateException(topic + "/" + queue + " at " + offset + ": " + r);
                Thread.sleep(100);
                continue;
            }
            offset = next;
        }
    }

    static RemotingCommand call(int code, Object... fields) throws Exception {
        RemotingCommand request = RemotingCommand.createRequestCommand(code, null);
        for (int i = 0; i < fields.length; i += 2) request.addExtField((String) fields[i], String.valueOf(fields[i + 1]));
        return client.invokeSync(broker, request, 15000);
    }

    static long number(RemotingCommand r, String name) {
        String value = r.getExtFields() == null ? null : r.getExtFields().get(name);
        if (value == null) throw new IllegalStateException(r.toString());
        return Long.parseLong(value);
    }

    static List<ByteBuffer> split(byte[] body) {
        List<ByteBuffer> found = new ArrayList<>();
        for (int at = 0; at < body.length; at += found.get(found.size() - 1).remaining())
            found.add(ByteBuffer.wrap(body, at, ByteBuffer.wrap(body, at, 4).getInt()).slice());
        return found;
    }
}
