// A trace has what threads and streams have done, in a bounded ring, and its file is replaced as a
// whole.
#include "machine/trace/trace.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "../../devices.h"
#include "../../temporary_directory.h"
#include "machine/trace/trace_file.h"

namespace hybridopt {
namespace {

std::unique_ptr<Device> SlowSim() {
  const SimOptions options{1 << 20, 1, 20'000};
  return std::move(CreateSimDevice(options, *SelectKernels().value()).value());
}

std::string ContentOf(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

TEST(TraceTest, WorkOfStreamsIsShownInOrder) {
  const std::unique_ptr<Device> device = SlowSim();
  const StreamHandle stream = device->CreateStream("down").value();
  Trace trace(*device);
  ASSERT_TRUE(trace.Start(Trace::kLeastRingBytes).ok());
  trace.SetStep(7);
  trace.SetAnchor(stream);
  for (uint32_t chunk = 0; chunk < 5; ++chunk) {
    TraceWork work(trace, TraceRow::kCopiesDown, stream, "grads down", chunk);
    work.AddBytes(100 + chunk);
  }
  ASSERT_TRUE(device->Synchronize(stream, -1).ok());
  trace.Stop();
  const TraceRecord record = trace.Record();
  EXPECT_EQ(record.dropped, 0u);
  ASSERT_EQ(record.events.size(), 5u);
  int64_t before_ns = record.begin_ns;
  for (uint32_t chunk = 0; chunk < 5; ++chunk) {
    const TraceEvent& event = record.events[chunk];
    EXPECT_EQ(event.chunk, chunk);
    EXPECT_EQ(event.step, 7u);
    EXPECT_EQ(event.bytes, 100 + chunk);
    EXPECT_LE(before_ns, event.begin_ns);
    EXPECT_LE(event.begin_ns, event.end_ns);
    EXPECT_LE(event.end_ns, record.end_ns);
    before_ns = event.end_ns;
  }
  EXPECT_TRUE(device->DestroyStream(stream).ok());
}

TEST(TraceTest, WorkThatHasNotEndedIsDropped) {
  const std::unique_ptr<Device> device = SlowSim();
  const StreamHandle stream = device->CreateStream("down").value();
  std::atomic<uint64_t>* const flag = device->NewFlag().value();
  Trace trace(*device);
  ASSERT_TRUE(trace.Start(0x10000).ok());
  trace.SetAnchor(stream);
  ASSERT_TRUE(device->StreamWaitFlag(stream, flag, 1).ok());
  for (uint32_t i = 0; i < 100u; ++i)
    const TraceWork work(trace, TraceRow::kCopiesDown, stream, "grads down");
  trace.Stop();
  EXPECT_EQ(trace.Record().dropped, 100u);
  EXPECT_TRUE(trace.Record().events.empty());
  *flag = 1;
  EXPECT_TRUE(device->DestroyStream(stream).ok());
}

TEST(TraceTest, TheRingKeepsTheLatestAndTellsTheRest) {
  const std::unique_ptr<Device> device = CreateHostDevice();
  Trace trace(*device);
  { const TraceSpan before(trace, TraceRow::kSteps, "before"); }
  ASSERT_TRUE(trace.Start(Trace::kLeastRingBytes).ok());
  for (uint32_t i = 0; i < 1000; ++i) const TraceSpan span(trace, TraceRow::kSteps, "update", i);
  trace.Stop();
  { const TraceSpan after(trace, TraceRow::kSteps, "after"); }
  const TraceRecord record = trace.Record();
  EXPECT_LE(record.ring_bytes, Trace::kLeastRingBytes);
  EXPECT_EQ(record.events.size(), record.ring_bytes / sizeof(TraceEvent));
  EXPECT_EQ(record.events.size() + record.dropped, 1000u);
  std::vector<bool> found(1000);
  for (const TraceEvent& event : record.events) found[event.chunk] = true;
  for (uint32_t i = 0; i < 1000; ++i) EXPECT_EQ(found[i], i >= record.dropped) << i;
}

TEST(TraceTest, TheFileIsReplacedAsAWholeAndFailuresSayWhere) {
  const TemporaryDirectory directory;
  TraceRecord record;
  record.dropped = 3;
  record.ring_bytes = 96;
  record.begin_ns = 1000;
  record.end_ns = 9000;
  record.events.push_back({"grads down", 2500, 4000, 17, 2, TraceRow::kCopiesDown, 1});
  const std::string path = directory / "trace.json";
  std::ofstream(path) << "old";
  ASSERT_TRUE(WriteTrace(system::SystemFiles(), path, record, "a \"device\"\n").ok());
  const std::string text = ContentOf(path);
  for (const char* part : {R"("device":"a \"device\"\u000a")", R"("dropped_events":3)",
                           R"("name":"stream: copies down")",
                           R"("name":"grads down","pid":1,"tid":5,"ts":1.500,"dur":1.500)",
                           R"("args":{"step":2,"chunk":1,"bytes":17})"})
    EXPECT_NE(text.find(part), std::string::npos) << part << " in " << text;
  const std::string missing = directory / "missing/trace.json";
  const Status failure = WriteTrace(system::SystemFiles(), missing, record, "sim");
  EXPECT_EQ(failure.code(), OFFLOAD_IO_FAILED);
  for (const std::string& part : {"path is '" + missing, std::string("No such file or directory"),
                                  std::string("another path")})
    EXPECT_NE(failure.message().find(part), std::string::npos) << failure.message();
  EXPECT_FALSE(WriteTrace(system::SystemFiles(), directory / ".", record, "sim").ok());
  std::vector<std::string> names;
  ASSERT_EQ(system::SystemFiles().List(directory / "", &names), 0);
  EXPECT_EQ(names, std::vector<std::string>{"trace.json"});  // no failure leaves anything behind
}

// Perfetto leaves out an event that begins inside another one of its row and ends behind it.
TEST(TraceTest, EventsOfARowLieInOneAnotherOrApart) {
  const TemporaryDirectory directory;
  TraceRecord record;
  const auto add = [&](const char* name, int64_t begin_ns, int64_t end_ns, TraceRow row) {
    record.events.push_back({name, begin_ns, end_ns, 0, 1, row});
  };
  add("around", 0, 10000, TraceRow::kCopiesUp);
  add("other row", 1000, 20000, TraceRow::kCopiesDown);
  add("inside", 2000, 5000, TraceRow::kCopiesUp);
  add("behind inside", 4000, 8000, TraceRow::kCopiesUp);
  add("behind both", 7000, 15000, TraceRow::kCopiesUp);
  add("apart", 16000, 17000, TraceRow::kCopiesUp);
  const std::string path = directory / "trace.json";
  ASSERT_TRUE(WriteTrace(system::SystemFiles(), path, record, "sim").ok());
  const std::string text = ContentOf(path);
  for (const char* part : {R"("name":"around","pid":1,"tid":6,"ts":0.000,"dur":10.000)",
                           R"("name":"other row","pid":1,"tid":5,"ts":1.000,"dur":19.000)",
                           R"("name":"inside","pid":1,"tid":6,"ts":2.000,"dur":3.000)",
                           R"("name":"behind inside","pid":1,"tid":6,"ts":5.000,"dur":3.000)",
                           R"("name":"behind both","pid":1,"tid":6,"ts":10.000,"dur":5.000)",
                           R"("name":"apart","pid":1,"tid":6,"ts":16.000,"dur":1.000)"})
    EXPECT_NE(text.find(part), std::string::npos) << part << " in " << text;
}

// Files whose calls give a result of their own, for a number of times, instead of or behind the
// system's.
class OddFiles : public system::Files {
 public:
  int interrupted_opens = 0;
  int interrupted_writes = 0;
  int interrupted_renames = 0;
  int close_result = 0;
  uint64_t write_most = UINT64_MAX;  // bytes of one call
  int64_t room = INT64_MAX;          // on the disk

  int OpenFile(const std::string& path, Open how) override {
    return interrupted_opens-- > 0 ? -EINTR : Files::OpenFile(path, how);
  }
  int64_t Write(int file, const void* data, uint64_t bytes, uint64_t offset) override {
    if (interrupted_writes-- > 0) return -EINTR;
    if (room <= 0) return -ENOSPC;
    const int64_t wrote = Files::Write(
        file, data, std::min({bytes, write_most, static_cast<uint64_t>(room)}), offset);
    room -= wrote;
    return wrote;
  }
  int Close(int file) override {
    const int closed = Files::Close(file);
    return close_result != 0 ? close_result : closed;
  }
  int Rename(const std::string& from, const std::string& to) override {
    return interrupted_renames-- > 0 ? -EINTR : Files::Rename(from, to);
  }
};

// More than the writer collects for one call.
TraceRecord LargeRecord() {
  TraceRecord record;
  for (int64_t i = 0; i < 20'000; ++i)
    record.events.push_back({"update", i, i + 1, 0, 1, WorkerRow(0), 7});
  return record;
}

TEST(TraceTest, SignalsAndShortWritesDoNotChangeTheFile) {
  const TemporaryDirectory directory;
  const std::string path = directory / "trace.json", odd_path = directory / "odd.json";
  ASSERT_TRUE(WriteTrace(system::SystemFiles(), path, LargeRecord(), "sim").ok());
  OddFiles odd;
  odd.interrupted_opens = odd.interrupted_writes = odd.interrupted_renames = 3;
  odd.write_most = 9973;
  odd.close_result = -EINTR;
  const Status status = WriteTrace(odd, odd_path, LargeRecord(), "sim");
  ASSERT_TRUE(status.ok()) << status.message();
  const std::string text = ContentOf(path);
  ASSERT_GT(text.size(), size_t{1} << 20);
  EXPECT_TRUE(ContentOf(odd_path) == text);
}

TEST(TraceTest, AFullDiskAndAFailedCloseLeaveTheOldFile) {
  const TemporaryDirectory directory;
  const std::string path = directory / "trace.json";
  std::ofstream(path) << "old";
  OddFiles full, failing;
  full.room = int64_t{3} << 19;
  failing.close_result = -EIO;
  for (const auto& [files, what] :
       {std::pair(&full, "No space left"), std::pair(&failing, "could not close")}) {
    const Status status = WriteTrace(*files, path, LargeRecord(), "sim");
    EXPECT_EQ(status.code(), OFFLOAD_IO_FAILED);
    for (const char* part : {what, "the trace is kept", "another path"})
      EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
    std::vector<std::string> names;
    ASSERT_EQ(system::SystemFiles().List(directory / "", &names), 0);
    EXPECT_EQ(names, std::vector<std::string>{"trace.json"});
    EXPECT_TRUE(ContentOf(path) == "old");
  }
}

}  // namespace
}  // namespace hybridopt
