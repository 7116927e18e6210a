import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.Base64;
import java.util.HashMap;
import java.util.Map;
import org.apache.rocketmq.filter.expression.BooleanExpression;
import org.apache.rocketmq.filter.expression.EvaluationContext;
import org.apache.rocketmq.filter.parser.SelectorParser;

/**
 * What the broker's own filter says. One question a line: expression, then names and values of properties, all in
 * Base64, separated by spaces. Answers: invalid, true, false, null, error, other.
 */
public class Selector {
    public static void main(String[] args) throws Exception {
        BufferedReader questions = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.US_ASCII));
        StringBuilder answers = new StringBuilder();
        for (String line = questions.readLine(); line != null; line = questions.readLine()) {
            answers.append(answer(line.split(" ", -1))).append('\n');
        }
        System.out.print(answers);
    }

    private static String answer(String[] parts) {
        BooleanExpression expression;
        try {
            expression = SelectorParser.parse(text(parts[0]));
        } catch (Throwable error) {
            return "invalid";
        }
        Map<String, Object> properties = new HashMap<>();
        for (int i = 1; i + 1 < parts.length; i += 2) {
            properties.put(text(parts[i]), text(parts[i + 1]));
        }
        EvaluationContext context = new EvaluationContext() {
            @Override
            public Object get(String name) {
                return properties.get(name);
            }

            @Override
            public Map<String, Object> keyValues() {
                return properties;
            }
        };
        try {
            Object value = expression.evaluate(context);
            return value == null || value instanceof Boolean ? String.valueOf(value) : "other";
        } catch (Throwable error) {
            return "error";
        }
    }

    private static String text(String encoded) {
        return new String(Base64.getDecoder().decode(encoded), StandardCharsets.UTF_8);
    }
}
