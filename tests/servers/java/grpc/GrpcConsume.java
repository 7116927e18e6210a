import java.io.PrintWriter;
import java.nio.ByteBuffer;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.atomic.*;
import java.util.concurrent.locks.LockSupport;
import java.util.zip.CRC32;
import org.apache.rocketmq.client.apis.*;
import org.apache.rocketmq.client.apis.consumer.*;
import org.apache.rocketmq.client.apis.message.MessageView;

/**
 * A gRPC simple consumer. args: endpoints group topic wanted idleSeconds output invisibleSeconds tag forget
 * Ends when wanted messages were acknowledged, or none came for idleSeconds. The first forget messages are not
 * acknowledged when they come first. With -Dconsume.pause.ms=n it takes n ms for a message, with -Dconsume.threads=n
 * it receives in n threads.
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
        AtomicInteger done = new AtomicInteger(), toForget = new AtomicInteger(forget);
        AtomicLong last = new AtomicLong(System.currentTimeMillis());
        try (PrintWriter out = new PrintWriter(a[5], "UTF-8")) {
            Thread[] threads = new Thread[Integer.getInteger("consume.threads", 1)];
            for (int t = 0; t < threads.length; t++) {
                threads[t] = new Thread(() -> {
                    while (done.get() < wanted && System.currentTimeMillis() - last.get() < idle) {
                        try {
                            for (MessageView m : consumer.receive(32, invisible)) {
                                Thread.sleep(pause);
                                took(consumer, m, out, done, toForget);
                                last.set(System.currentTimeMillis());
                            }
                        } catch (ClientException e) {
                            System.err.println(e);
                            LockSupport.parkNanos(200_000_000);
                        } catch (InterruptedException e) {
                            return;
                        }
                    }
                });
                threads[t].start();
            }
            for (Thread thread : threads) thread.join();
        }
        System.out.println("acknowledged " + done);
        System.exit(0);
    }

    static void took(SimpleConsumer consumer, MessageView m, PrintWriter out, AtomicInteger done, AtomicInteger toForget) {
        CRC32 crc = new CRC32();
        ByteBuffer body = m.getBody();
        int length = body.remaining();
        crc.update(body);
        String outcome = "ok";
        if (m.getDeliveryAttempt() == 1 && toForget.getAndDecrement() > 0) {
            outcome = "forgot";
        } else {
            try {
                consumer.ack(m);
                done.incrementAndGet();
            } catch (ClientException e) {
                System.err.println(e);
                outcome = "refused";
            }
        }
        synchronized (out) {
            out.println(crc.getValue() + " " + length + " " + m.getMessageId() + " " + m.getTag().orElse("-") + " "
                + m.getDeliveryAttempt() + " " + outcome);
            out.flush();
        }
    }
}
