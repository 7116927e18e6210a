// Consumes a topic with the Go client.
// args: mode(push, pull) namesrv group topic wanted idleSeconds output [broker queues]
// With CONSUME_PAUSE_MS=n the push consumer takes n ms for a message.
// The pull consumer is told the queues and reads each from its beginning; Pull() alone waits at every empty one.
// output: one line a message: queueId offset bodyCrc32 bodyLength storeTimestamp reconsumeTimes properties
// (hex of sorted name=value, separated by NUL)
package main

import (
	"bufio"
	"context"
	"fmt"
	"hash/crc32"
	"os"
	"sort"
	"strconv"
	"strings"
	"sync"
	"time"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/rlog"
)

var (
	mu   sync.Mutex
	out  *bufio.Writer
	got  int
	last = time.Now()
)

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// What the client itself adds to the stored properties.
var added = map[string]bool{"MIN_OFFSET": true, "MAX_OFFSET": true, "CONSUME_START_TIME": true, "CONSUME_START_TIMESTAMP": true}

func took(messages []*primitive.MessageExt) {
	mu.Lock()
	defer mu.Unlock()
	for _, m := range messages {
		var pairs []string
		for name, value := range m.GetProperties() {
			if !added[name] {
				pairs = append(pairs, name+"="+value)
			}
		}
		sort.Strings(pairs)
		fmt.Fprintf(out, "%d %d %d %d %d %d %x\n", m.Queue.QueueId, m.QueueOffset, crc32.ChecksumIEEE(m.Body), len(m.Body),
			m.StoreTimestamp, m.ReconsumeTimes, strings.Join(pairs, "\x00"))
	}
	out.Flush()
	got += len(messages)
	last = time.Now()
}

func main() {
	rlog.SetLogLevel("error")
	mode, name, group, topic := os.Args[1], os.Args[2], os.Args[3], os.Args[4]
	wanted, err := strconv.Atoi(os.Args[5])
	fail(err)
	idle, err := strconv.Atoi(os.Args[6])
	fail(err)
	file, err := os.Create(os.Args[7])
	fail(err)
	out = bufio.NewWriter(file)
	options := []consumer.Option{
		consumer.WithGroupName(group), consumer.WithNameServer([]string{name}),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset), consumer.WithInstance(group),
	}
	var stop func() error
	if mode == "push" {
		stop = push(topic, options)
	} else {
		stop = pull(topic, options)
	}
	for {
		mu.Lock()
		done := got >= wanted || time.Since(last) > time.Duration(idle)*time.Second
		mu.Unlock()
		if done {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	time.Sleep(500 * time.Millisecond)
	fail(stop())
	fmt.Println("consumed", got)
}

func push(topic string, options []consumer.Option) func() error {
	c, err := rocketmq.NewPushConsumer(append(options, consumer.WithConsumeMessageBatchMaxSize(16))...)
	fail(err)
	pause, _ := strconv.Atoi(os.Getenv("CONSUME_PAUSE_MS"))
	fail(c.Subscribe(topic, consumer.MessageSelector{}, func(_ context.Context, messages ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
		time.Sleep(time.Duration(pause*len(messages)) * time.Millisecond)
		took(messages)
		return consumer.ConsumeSuccess, nil
	}))
	fail(c.Start())
	return c.Shutdown
}

func pull(topic string, options []consumer.Option) func() error {
	c, err := rocketmq.NewPullConsumer(options...)
	fail(err)
	fail(c.Subscribe(topic, consumer.MessageSelector{}))
	fail(c.Start())
	queues, err := strconv.Atoi(os.Args[9])
	fail(err)
	for id := 0; id < queues; id++ {
		go pullQueue(c, &primitive.MessageQueue{Topic: topic, BrokerName: os.Args[8], QueueId: id})
	}
	return c.Shutdown
}

func pullQueue(c rocketmq.PullConsumer, queue *primitive.MessageQueue) {
	for offset := int64(0); ; {
		result, err := c.PullFrom(context.Background(), queue, offset, 32)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			time.Sleep(100 * time.Millisecond)
			continue
		}
		if result.Status == primitive.PullFound {
			took(result.GetMessageExts())
		}
		offset = result.NextBeginOffset
	}
}
