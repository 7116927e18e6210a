import java.io.PrintWriter;
import java.nio.ByteBuffer;
import java.time.Duration;
import java.util.*;
import java.util.zip.CRC32;
import org.apache.rocketmq.client.apis.*;
import org.apache.rocketmq.client.apis.consumer.*;
import org.apache.rocketmq.client.apis.message.MessageView;

/**
 * A gRPC simple consumer. args: endpoints group topic wanted idleSeconds output invisibleSeconds tag forget
 * Ends when wanted messages were acknowledged, or none came for idleSeconds. The first forget messages are not
 * acknowledged when they come first. With -Dconsume.pause.ms=n it takes n ms for a message.
 * output: a line a message: bodyCrc32 bodyLength messageId tag attempt outcome(ok, forgot, or refused: not acknowledged)
 */
public class GrpcConsume {
    public static void main(String[] a) throws Exception {
        int wanted = Integer.parseInt(a[3]), forget = Integer.parseInt(a[8]);
        long idle = Long.parseLong(a[4]) * 1000;
        long pause = Long.getLong("consume.pause.ms", 0);
        Duration invisible = Duration.ofSeconds(Long.parseLong(a[6]));
        ClientConfiguration configuration = ClientConfiguration.newBuilder().setEndpoints(a[0]).enableSsl(false)
            .setRequestTimeout(Duration.ofSeconds(20)).build();
        SimpleConsumer consumer = ClientServiceProvider.loadService().newSimpleConsumerBuilder()
            .setClientConfiguration(configuration).setConsumerGroup(a[1]).setAwaitDuration(Duration.ofSeconds(6))
            .setSubscriptionExpressions(Map.of(a[2], new FilterExpression(a[7], FilterExpressionType.TAG))).build();
        int done = 0;
        long last = System.currentTimeMillis();
        try (PrintWriter out = new PrintWriter(a[5], "UTF-8")) {
            while (done < wanted && System.currentTimeMillis() - last < idle) {
                List<MessageView> found;
                try {
                    found = consumer.receive(32, invisible);
                } catch (ClientException e) {
                    System.err.println(e);
                    Thread.sleep(200);
                    continue;
                }
                for (MessageView m : found) {
                    CRC32 crc = new CRC32();
                    ByteBuffer body = m.getBody();
                    int length = body.remaining();
                    crc.update(body);
                    String outcome = forget <= 0 || m.getDeliveryAttempt() > 1 ? "ok" : "forgot";
                    Thread.sleep(pause);
                    if (outcome.equals("ok")) {
                        try {
                            consumer.ack(m);
                            done++;
                        } catch (ClientException e) {
                            System.err.println(e);
                            outcome = "refused";
                        }
                    } else {
                        forget--;
                    }
                    out.println(crc.getValue() + " " + length + " " + m.getMessageId() + " " + m.getTag().orElse("-") + " "
                        + m.getDeliveryAttempt() + " " + outcome);
                    last = System.currentTimeMillis();
                }
                out.flush();
            }
        }
        System.out.println("acknowledged " + done);
        System.exit(0);
    }
}
