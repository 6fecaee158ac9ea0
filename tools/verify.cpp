#include <sstream>

#include "checkpoints.h"
#include "commands.h"
#include "text.h"

namespace tool {
namespace {

using namespace hybridopt::checkpoint;  // NOLINT: the tool is about checkpoints

std::string TextOf(const Reader& reader, const VerifyResult& result) {
  std::ostringstream out;
  if (result.damaged_blocks == 0) {
    out << "good: " << SizeText(result.bytes) << " of state in "
        << Counted(reader.manifest().files.size(), "file") << " match their hashes\n";
    return out.str();
  }
  using Align = Table::Align;
  Table table({{"damaged tensor", Align::kLeft},
               {"rank", Align::kRight},
               {"block", Align::kRight},
               {"file", Align::kLeft},
               {"bytes", Align::kLeft}});
  for (const Damage& damage : result.damages)
    table.Add({damage.param + "." + KindName(damage.kind), std::to_string(damage.rank),
               std::to_string(damage.block) + " of " + std::to_string(damage.block_count),
               damage.file, std::to_string(damage.begin) + " to " + std::to_string(damage.end)});
  table.Print(out);
  if (result.damaged_blocks > result.damages.size())
    out << "and " << result.damaged_blocks - result.damages.size() << " more\n";
  return out.str();
}

Json JsonOf(const VerifyResult& result) {
  Json damages = Json::array();
  for (const Damage& damage : result.damages)
    damages.push_back({{"param", damage.param},
                       {"kind", KindName(damage.kind)},
                       {"rank", damage.rank},
                       {"file", damage.file},
                       {"block", damage.block},
                       {"block_count", damage.block_count},
                       {"begin", damage.begin},
                       {"end", damage.end}});
  return {{"status", offload_status_name(result.status().code())},
          {"bytes", result.bytes},
          {"damaged_blocks", result.damaged_blocks},
          {"damages", damages}};
}

}  // namespace

Result<Report> Verify(const VerifyOptions& options) {
  HYBRIDOPT_ASSIGN(const Reader reader, OpenCheckpoint(options.directory));
  VerifyResult result;
  {
    ProgressBar bar("verifying");
    const auto show = [&](uint64_t done, uint64_t total) { bar.Show(done, total); };
    HYBRIDOPT_ASSIGN(result, reader.Verify(kIoDepth, show));
  }
  return Report{TextOf(reader, result), JsonOf(result), result.status()};
}

}  // namespace tool
