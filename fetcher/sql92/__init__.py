"""SQL92 filters on message properties, as a RocketMQ 5.x broker evaluates them (org.apache.rocketmq.filter)."""
