#include "machine/trace/trace_file.h"

#include <algorithm>
#include <cinttypes>
#include <cstdarg>
#include <cstdio>
#include <map>
#include <set>
#include <vector>

#include "checkpoint/file_io.h"
#include "checkpoint/format/json.h"

namespace hybridopt {
namespace {

constexpr size_t kWriteBytes = size_t{1} << 20;

[[gnu::format(printf, 2, 3)]] void Append(std::string* json, const char* format, ...) {
  char text[160];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  *json += text;
}

std::string NameOf(TraceRow row) {
  switch (row) {
    case TraceRow::kSteps:
      return "steps and moves";
    case TraceRow::kDeviceRing:
      return "state through the device";
    case TraceRow::kSave:
      return "save";
    case TraceRow::kCopiesDown:
      return "stream: copies down";
    case TraceRow::kCopiesUp:
      return "stream: copies up";
    case TraceRow::kDeviceUpdate:
      return "stream: device update";
    case TraceRow::kStateUpdate:
      return "stream: state update";
    default:
      break;
  }
  const auto number = static_cast<uint32_t>(row);
  const auto callers = static_cast<uint32_t>(TraceRow::kCallers);
  if (number >= callers) return "calling thread " + std::to_string(number - callers);
  return "worker " + std::to_string(number - static_cast<uint32_t>(TraceRow::kWorkers));
}

// Callers stand at the top of the picture.
uint32_t PlaceOf(TraceRow row) {
  return row >= TraceRow::kCallers ? 0 : 1 + static_cast<uint32_t>(row);
}

void AppendHead(const TraceRecord& record, const char* device, std::string* json) {
  *json += "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"library\":\"hybridopt\",\"device\":";
  checkpoint::AppendJsonString(json, device);
  Append(json, ",\"ring_bytes\":%" PRIu64 ",\"dropped_events\":%" PRIu64, record.ring_bytes,
         record.dropped);
  Append(json, ",\"seconds\":%.9f,\"clock_error_us\":%.3f},\n\"traceEvents\":[\n",
         static_cast<double>(record.end_ns - record.begin_ns) * 1e-9,
         static_cast<double>(record.clock_error_ns) * 1e-3);
  *json += "{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":1,\"args\":{\"name\":\"hybridopt\"}}";
}

// The number of a row's thread. Viewers show the thread that has the process's number, 1, as the
// main one, and thread 0 in its row.
uint32_t ThreadOf(TraceRow row) { return 2 + static_cast<uint32_t>(row); }

void AppendRow(TraceRow row, std::string* json) {
  const uint32_t number = ThreadOf(row);
  Append(json, ",\n{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":1,\"tid\":%u,\"args\":{\"name\":",
         number);
  checkpoint::AppendJsonString(json, NameOf(row));
  Append(json, "}},\n{\"ph\":\"M\",\"name\":\"thread_sort_index\",\"pid\":1,\"tid\":%u", number);
  Append(json, ",\"args\":{\"sort_index\":%u}}", PlaceOf(row));
}

void AppendEvent(const TraceEvent& event, int64_t begin_ns, std::string* json) {
  *json += ",\n{\"ph\":\"X\",\"name\":";
  checkpoint::AppendJsonString(json, event.name);
  Append(json, ",\"pid\":1,\"tid\":%u,\"ts\":%.3f,\"dur\":%.3f,\"args\":{\"step\":%" PRIu64,
         ThreadOf(event.row), static_cast<double>(event.begin_ns - begin_ns) * 1e-3,
         static_cast<double>(event.end_ns - event.begin_ns) * 1e-3, event.step);
  if (event.chunk != TraceEvent::kNoChunk) Append(json, ",\"chunk\":%u", event.chunk);
  if (event.bytes != 0) Append(json, ",\"bytes\":%" PRIu64, event.bytes);
  *json += "}}";
}

// Viewers leave out an event that begins inside another one of its row and ends behind it. Where
// two threads queue copies on one stream, their work there may look like that: the later work is
// then shown from the end of the earlier work on, since a stream does one after the other.
class Apart {
 public:
  // To be called for all events, in the order of their beginnings.
  TraceEvent operator()(TraceEvent event) {
    std::vector<int64_t>& open = open_[event.row];
    while (!open.empty() && open.back() < event.end_ns) {
      event.begin_ns = std::max(event.begin_ns, open.back());
      open.pop_back();
    }
    open.push_back(event.end_ns);
    return event;
  }

 private:
  std::map<TraceRow, std::vector<int64_t>> open_;  // the ends of events, the outermost first
};

// Removes a file at the end of a function, also if the function ends with an exception.
class Removing {
 public:
  Removing(system::Files& files, const std::string& path) : files_(files), path_(path) {}
  ~Removing() { (void)files_.Remove(path_); }
  Removing(const Removing&) = delete;
  Removing& operator=(const Removing&) = delete;

 private:
  system::Files& files_;
  const std::string& path_;
};

Status WriteEvents(checkpoint::TextFile& file, const TraceRecord& record, const char* device) {
  std::string json;
  AppendHead(record, device, &json);
  std::set<TraceRow> rows;
  for (const TraceEvent& event : record.events) rows.insert(event.row);
  for (TraceRow row : rows) AppendRow(row, &json);
  Apart apart;
  for (const TraceEvent& event : record.events) {
    AppendEvent(apart(event), record.begin_ns, &json);
    if (json.size() < kWriteBytes) continue;
    HYBRIDOPT_TRY(file.Append(json));
    json.clear();
  }
  json += "\n]}\n";
  HYBRIDOPT_TRY(file.Append(json));
  return file.Finish();
}

// The file gets its name when it is complete.
Status WriteAndRename(system::Files& files, const std::string& path, const TraceRecord& record,
                      const char* device) {
  const std::string partial = path + "." + std::to_string(system::RandomBits());
  checkpoint::TextFile file(files, partial);
  HYBRIDOPT_TRY(file.Create());
  const Removing removing(files, partial);  // after it was renamed, there is nothing to remove
  HYBRIDOPT_TRY(WriteEvents(file, record, device));
  const int error = checkpoint::Uninterrupted([&] { return files.Rename(partial, path); });
  return error == 0 ? Status() : checkpoint::IoError("rename", partial, error);
}

}  // namespace

Status WriteTrace(system::Files& files, const std::string& path, const TraceRecord& record,
                  const char* device) {
  const Status written = WriteAndRename(files, path, record, device);
  if (written.ok()) return {};
  return Status::Error(OFFLOAD_IO_FAILED,
                       "path is '%.200s', and no trace could be written there: %s; the trace is "
                       "kept, call offload_optimizer_trace_stop again with another path (NULL "
                       "gives the trace up)",
                       path.c_str(), written.message().c_str());
}

}  // namespace hybridopt
