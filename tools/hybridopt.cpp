// hybridopt: looks at checkpoints, verifies, reshards and exports them. Exit codes: 0 done, 1 the
// checkpoint is damaged or does not hold what was asked for, 2 wrong usage, 3 could not be done.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <iostream>
#include <new>

#include "commands.h"

namespace tool {
namespace {

constexpr int kUsage = 2;

int ExitCode(const Status& status) {
  switch (status.code()) {
    case OFFLOAD_OK:
      return 0;
    case OFFLOAD_CHECKPOINT_CORRUPT:
    case OFFLOAD_CHECKPOINT_MISMATCH:
      return 1;
    case OFFLOAD_INVALID_ARGUMENT:
      return kUsage;
    default:
      return 3;
  }
}

int Tell(const Result<Report>& result, bool json) {
  const Status& status = result.ok() ? result.value().status : result.status();
  if (json) {
    Json object =
        result.ok() ? result.value().json : Json{{"status", offload_status_name(status.code())}};
    if (!status.ok()) object["error"] = status.message();
    std::cout << object.dump(2, ' ', false, Json::error_handler_t::replace) << '\n';
  } else if (result.ok()) {
    std::cout << result.value().text;
  }
  std::cout.flush();
  if (!json && !status.ok()) std::cerr << "hybridopt: " << status.message() << '\n';
  if (std::cout.good()) return ExitCode(status);
  std::cerr << "hybridopt: could not write to standard output\n";
  return 3;
}

int Main(int argc, char** argv) {
  CLI::App app("Looks at checkpoints of hybridopt, verifies, reshards and exports them.",
               "hybridopt");
  app.set_version_flag("--version", "hybridopt " HYBRIDOPT_VERSION);
  app.require_subcommand(1);
  bool json = false;
  const auto add_json = [&](CLI::App* command) {
    command->add_flag("--json", json, "print one JSON object");
  };

  InspectOptions inspect;
  CLI::App* const inspect_command = app.add_subcommand(
      "inspect", "lists the tensors of a checkpoint; checks manifest and headers, not the data");
  inspect_command->add_option("DIR", inspect.directory, "a checkpoint")->required();
  add_json(inspect_command);

  VerifyOptions verify;
  CLI::App* const verify_command =
      app.add_subcommand("verify", "reads every byte, compares every hash, names what is damaged");
  verify_command->add_option("DIR", verify.directory, "a checkpoint")->required();
  add_json(verify_command);

  ReshardOptions reshard;
  CLI::App* const reshard_command = app.add_subcommand(
      "reshard", "writes the same state as another number of ranks would have saved it");
  reshard_command->add_option("DIR", reshard.directory, "a checkpoint")->required();
  reshard_command->add_option("OUT", reshard.out, "the checkpoint to make")->required();
  reshard_command
      ->add_option("--world", reshard.world,
                   "ranks; each gets an even range of every tensor; with 1, whole tensors")
      ->required()
      ->check(CLI::Range(1, 65536));
  add_json(reshard_command);

  ExportOptions exported;
  CLI::App* const export_command = app.add_subcommand(
      "export", "writes one kind of state as one safetensors file of whole tensors");
  export_command->add_option("DIR", exported.directory, "a checkpoint")->required();
  export_command->add_option("OUT", exported.out, "the safetensors file to make")->required();
  export_command->add_option("--what", exported.what, "the kind of state")
      ->check(CLI::IsMember({"master", "exp_avg", "exp_avg_sq", "momentum_buffer", "sum"}))
      ->capture_default_str();
  export_command->add_option("--dtype", exported.dtype, "of the elements, rounded to nearest")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}))
      ->capture_default_str();
  add_json(export_command);

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kUsage;
  }
  if (*inspect_command) return Tell(Inspect(inspect), json);
  if (*verify_command) return Tell(Verify(verify), json);
  if (*reshard_command) return Tell(Reshard(reshard), json);
  return Tell(Export(exported), json);
}

}  // namespace
}  // namespace tool

int main(int argc, char** argv) {
  try {
    return tool::Main(argc, argv);
  } catch (const std::bad_alloc&) {
    std::fputs("hybridopt: out of memory\n", stderr);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "hybridopt: %s\n", error.what());
  }
  return 3;
}
