import java.nio.file.*;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/** args: file. Runs mqadmin's commands in one process: one a line, arguments tab-separated; each after a line "=== n". */
public class Tools {
    public static void main(String[] a) throws Exception {
        int number = 0;
        for (String line : Files.readAllLines(Paths.get(a[0]))) {
            System.out.println("=== " + number++);
            MQAdminStartup.main(line.split("\t"));
            System.out.flush();
        }
        System.exit(0);
    }
}
