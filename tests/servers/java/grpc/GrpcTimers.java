import java.nio.charset.StandardCharsets;
import org.apache.rocketmq.client.apis.*;
import org.apache.rocketmq.client.apis.producer.*;

/**
 * Sends one message to be delivered at each of some times, ms since the epoch.
 * args: endpoint topic time...
 * Prints one line each: time messageId, or time and the error.
 */
public class GrpcTimers {
    public static void main(String[] a) throws Exception {
        ClientServiceProvider provider = ClientServiceProvider.loadService();
        ClientConfiguration configuration = ClientConfiguration.newBuilder().setEndpoints(a[0]).enableSsl(false)
            .setRequestTimeout(java.time.Duration.ofSeconds(20)).build();
        Producer producer = provider.newProducerBuilder().setClientConfiguration(configuration).setTopics(a[1]).build();
        for (int i = 2; i < a.length; i++) {
            try {
                SendReceipt receipt = producer.send(provider.newMessageBuilder().setTopic(a[1]).setTag("timer").setKeys(a[i])
                    .setBody(a[i].getBytes(StandardCharsets.UTF_8)).setDeliveryTimestamp(Long.parseLong(a[i])).build());
                System.out.println(a[i] + " " + receipt.getMessageId());
            } catch (ClientException e) {
                System.out.println(a[i] + " " + e.getMessage().replace('\n', ' '));
            }
        }
        producer.close();
        System.exit(0);
    }
}
