// hybridopt: reports what this machine can do and how much memory optimizer state takes; lists,
// verifies, reshards and exports checkpoints. Exit codes: 0 done, 1 the answer is no (the
// checkpoint is damaged or does not hold what was asked for, the training does not fit), 2 wrong
// usage, 3 could not be done.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <functional>
#include <iostream>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "base/utf8.h"
#include "commands.h"
#include "text.h"

namespace tool {
namespace {

constexpr int kAnswerIsNo = 1;
constexpr int kUsage = 2;
constexpr bool kInAscii = true;  // for JSON: names may contain control sequences of a terminal

// The exit code of a command that could not answer, or found damage.
int ExitCode(const Status& status) {
  switch (status.code()) {
    case OFFLOAD_OK:
      return 0;
    case OFFLOAD_CHECKPOINT_CORRUPT:
    case OFFLOAD_CHECKPOINT_MISMATCH:
      return kAnswerIsNo;
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
    std::cout << object.dump(2, ' ', kInAscii, Json::error_handler_t::replace) << '\n';
  } else if (result.ok()) {
    std::cout << result.value().text;
  }
  std::cout.flush();
  if (!json && !status.ok()) std::cerr << "hybridopt: " << status.message() << '\n';
  const bool is_no = result.ok() && (status.code() == OFFLOAD_OUT_OF_HOST_MEMORY);
  if (std::cout.good()) return is_no ? kAnswerIsNo : ExitCode(status);
  std::cerr << "hybridopt: could not write to standard output\n";
  return 3;
}

// What the command line asks for.
struct Request {
  std::function<Result<Report>()> run;
  bool json = false;
};

// Adds a command, to which the caller adds its options. `run` executes it.
CLI::App* AddCommand(CLI::App& app, Request& request, const char* name, const char* text,
                     std::function<Result<Report>()> run) {
  CLI::App* const command = app.add_subcommand(name, text);
  command->callback([&request, run] { request.run = run; });
  command->add_flag("--json", request.json, "print one JSON object");
  return command;
}

// Adds an option that is a number of bytes.
CLI::Option* AddSize(CLI::App* command, const char* name, uint64_t& bytes, const char* text) {
  CLI::AsSizeValue size(true);
  size.description("");  // else --help has all units
  return command->add_option(name, bytes, text)->transform(size)->type_name("SIZE");
}

void AddDoctor(CLI::App& app, Request& request) {
  const auto options = std::make_shared<DoctorOptions>();
  CLI::App* const doctor = AddCommand(
      app, request, "doctor", "measures what this machine can do, and says what holds it back",
      [options] { return Doctor(*options); });
  doctor->add_option("DIR", options->directory, "a directory whose disk is measured too");
  doctor
      ->add_option("--device", options->device,
                   "else the GPU where there is one; sim shows only that it works")
      ->check(CLI::IsMember({"cuda", "sim", "none"}));
  AddSize(doctor, "--memory", options->memory_bytes,
          "the most to take; else an eighth of what is available, at most 4 GiB,\n"
          "and half of what is available to see how much can be pinned");
}

void AddBench(CLI::App& app, Request& request) {
  const auto options = std::make_shared<BenchOptions>();
  CLI::App* const bench =
      AddCommand(app, request, "bench", "measures steps against what memory and link allow here",
                 [options] { return Bench(*options); });
  bench
      ->add_option("--device", options->device,
                   "else the GPU where there is one; sim shows only that it works")
      ->check(CLI::IsMember({"cuda", "sim", "none"}));
  AddSize(bench, "--memory", options->memory_bytes,
          "the most to take; else an eighth of what is available, at most 4 GiB");
  bench->add_option("--seconds", options->seconds, "how long, about")
      ->check(CLI::Range(0.0, 3600.0))
      ->capture_default_str();
}

void AddTrace(CLI::App& app, Request& request) {
  const auto options = std::make_shared<TraceOptions>();
  CLI::App* const trace = AddCommand(
      app, request, "trace",
      "records a few steps as a picture for ui.perfetto.dev, and tells where their time went",
      [options] { return Trace(*options); });
  trace->add_option("FILE", options->path, "the JSON file to make")->required();
  CLI::Option* const read = trace->add_flag(
      "--read", options->read, "FILE is there, as of a training of yours; nothing is recorded");
  trace
      ->add_option("--params", options->params,
                   "of the training that is recorded: a number or a model, as for plan")
      ->excludes(read)
      ->capture_default_str();
  trace->add_option("--steps", options->steps, "that are recorded")
      ->excludes(read)
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  trace
      ->add_option("--device", options->device,
                   "else the GPU where there is one; sim shows only that it works")
      ->excludes(read)
      ->check(CLI::IsMember({"cuda", "sim", "none"}));
  trace
      ->add_option("--offload-fraction", options->offload_fraction,
                   "of the state, on the host, where there is a device")
      ->excludes(read)
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  trace->add_flag("--small-state", options->small_state, "split masters and bf16 moments")
      ->excludes(read);
}

void AddPlan(CLI::App& app, Request& request) {
  const auto options = std::make_shared<PlanOptions>();
  CLI::App* const plan = AddCommand(
      app, request, "plan",
      "tells what a model's optimizer state takes, what fits, and the line of Python to paste",
      [options] { return Plan(*options); });
  plan->add_option("MODEL", options->model,
                   "a number of parameters (7e9, 7B), a well-known model (qwen3-8b),\n"
                   "a config.json, safetensors, or a directory of these")
      ->required();
  plan->add_option("--algorithm", options->algorithm, "as in adamw, sgd, lion")
      ->capture_default_str();
  plan->add_option("--dtype", options->dtype, "of params and gradients")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}))
      ->capture_default_str();
  CLI::Option* const offloaded = plan->add_option(
      "--offload-fraction", options->offload_fraction,
      "of the state, on the host; without it the plan has 1\nand the table the least that fits");
  plan->add_option("--device-fraction", options->device_fraction,
                   "what C and Rust call the same choice: 1 less the offload fraction")
      ->excludes(offloaded);
  plan->add_flag("--small-state", options->small_state,
                 "split masters (of bf16 params) and bf16 moments");
  plan->add_option("--master-layout", options->master_layout,
                   "of bf16 params, as in fp32 or split");
  plan->add_flag("--hook-gradients", options->hook_gradients,
                 "gradients leave during the backward pass,\nwhich takes room on the host");
  const auto add_size = [plan](const char* name, uint64_t& bytes, const char* text) {
    AddSize(plan, name, bytes, text);
  };
  add_size("--early-updates", options->early_bytes,
           "memory on the host for early updates; with --hook-gradients");
  add_size("--activations", options->activations_bytes,
           "that wait for the backward pass, as 60GiB: counted on the device");
  add_size("--stash", options->stash_bytes, "budget of an activation stash, on the host");
  plan->add_option("--gpus", options->gpus,
                   "ranks of one host that share params, gradients and state,\nas FSDP2 does")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  plan->add_option("--machine", options->machine,
                   "what hybridopt doctor --json printed on the machine,\n"
                   "for its memory and the time of a step");
  add_size("--host-memory", options->host_memory_bytes,
           "of another machine; else what is available here");
  add_size("--device-memory", options->device_memory_bytes,
           "of another machine; else what is free on the GPU here");
}

void AddCheckpointCommands(CLI::App& app, Request& request) {
  const auto list = std::make_shared<ListOptions>();
  AddCommand(app, request, "list", "lists the checkpoints in a directory",
             [list] { return List(*list); })
      ->add_option("DIR", list->directory, "a directory that holds checkpoints")
      ->required();

  const auto newest = std::make_shared<NewestOptions>();
  CLI::App* const finding =
      AddCommand(app, request, "newest", "prints the path of the good checkpoint of the last step",
                 [newest] { return Newest(*newest); });
  finding->add_option("DIR", newest->directory, "a directory that holds checkpoints")->required();
  finding->add_flag("--verify", newest->verify,
                    "read every byte before a checkpoint is called good");

  const auto inspect = std::make_shared<InspectOptions>();
  AddCommand(app, request, "inspect",
             "lists the tensors of a checkpoint; checks manifest and headers, not the data",
             [inspect] { return Inspect(*inspect); })
      ->add_option("DIR", inspect->directory, "a checkpoint")
      ->required();

  const auto verify = std::make_shared<VerifyOptions>();
  AddCommand(app, request, "verify", "reads every byte, compares every hash, names what is damaged",
             [verify] { return Verify(*verify); })
      ->add_option("DIR", verify->directory, "a checkpoint")
      ->required();

  const auto reshard = std::make_shared<ReshardOptions>();
  CLI::App* const resharding =
      AddCommand(app, request, "reshard",
                 "writes the same state as another number of ranks would have saved it",
                 [reshard] { return Reshard(*reshard); });
  resharding->add_option("DIR", reshard->directory, "a checkpoint")->required();
  resharding->add_option("OUT", reshard->out, "the checkpoint to make")->required();
  resharding
      ->add_option("--world", reshard->world,
                   "ranks; each gets an even range of every tensor; with 1, whole tensors")
      ->required()
      ->check(CLI::Range(1, 65536));

  const auto exported = std::make_shared<ExportOptions>();
  CLI::App* const exporting = AddCommand(
      app, request, "export", "writes one kind of state as one safetensors file of whole tensors",
      [exported] { return Export(*exported); });
  exporting->add_option("DIR", exported->directory, "a checkpoint")->required();
  exporting->add_option("OUT", exported->out, "the safetensors file to make")->required();
  exporting->add_option("--what", exported->what, "the kind of state")
      ->check(CLI::IsMember({"master", "exp_avg", "exp_avg_sq", "momentum_buffer", "sum"}))
      ->capture_default_str();
  exporting->add_option("--dtype", exported->dtype, "of the elements, rounded to nearest")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}))
      ->capture_default_str();
}

// "'pla': no such command; did you mean 'plan'?"
std::string NoSuch(const char* what, const std::string& word,
                   const std::vector<std::string>& words) {
  const std::string nearest = NearestWord(word, words);
  return "'" + hybridopt::Printable(word) + "': no such " + what +
         (nearest.empty() ? "" : "; did you mean '" + nearest + "'?");
}

// Empty if the word is a command; else an error text that names the most similar command.
std::string UnknownCommand(const CLI::App& app, const std::string& word) {
  std::vector<std::string> commands;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (word == command->get_name()) return "";
    commands.push_back(command->get_name());
  }
  return NoSuch("command", word, commands);
}

// An error text about a word that the command does not know.
std::string UnknownWord(const CLI::App& command, const std::string& word) {
  if (word.empty() || word[0] != '-')
    return "'" + hybridopt::Printable(word) + "' was not expected: no more words belong here";
  std::vector<std::string> options;
  for (const CLI::Option* option : command.get_options())
    for (const std::string& name : option->get_lnames()) options.push_back("--" + name);
  return NoSuch("option", word.substr(0, word.find('=')), options);
}

// Writes what is wrong and where the options are. `command` is "hybridopt" alone, or with a
// command's name.
int Refuse(const std::string& command, const std::string& text) {
  std::cerr << command << ": " << text << "\nRun '" << command
            << " --help' for more information.\n";
  return kUsage;
}

bool IsIn(const std::vector<std::string>& words, const std::string& word) {
  return word != "--" && std::find(words.begin(), words.end(), word) != words.end();
}

// Also --help and --version come here.
int WrongUsage(const CLI::App& app, const CLI::ParseError& error,
               const std::vector<std::string>& words) {
  if (error.get_exit_code() == 0) return app.exit(error);
  const std::vector<CLI::App*> commands = app.get_subcommands();
  const CLI::App& command = commands.empty() ? app : *commands[0];
  const std::string name = commands.empty() ? "hybridopt" : "hybridopt " + command.get_name();
  if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::ExtrasError))
    for (const std::string& word : words) {  // in this order, which CLI11's list does not have
      if (IsIn(app.remaining(), word)) return Refuse("hybridopt", UnknownWord(app, word));
      if (IsIn(command.remaining(), word)) return Refuse(name, UnknownWord(command, word));
    }
  return Refuse(name, commands.empty() ? "a command is required, such as 'hybridopt plan 8B'"
                                       : hybridopt::Printable(error.what()));
}

int Main(int argc, char** argv) {
  CLI::App app(
      "Optimizer state in host memory: what it takes on this machine, and its checkpoints.",
      "hybridopt");
  app.set_version_flag("--version", "hybridopt " HYBRIDOPT_VERSION);
  app.require_subcommand(1);
  Request request;
  AddCommand(app, request, "info", "tells of this library, this machine and its GPU", Info);
  AddDoctor(app, request);
  AddBench(app, request);
  AddTrace(app, request);
  AddPlan(app, request);
  AddCheckpointCommands(app, request);
  const std::string wrong =
      argc > 1 && argv[1][0] != '-' ? UnknownCommand(app, argv[1]) : std::string();
  if (!wrong.empty()) return Refuse("hybridopt", wrong);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return WrongUsage(app, error, {argv + 1, argv + argc});
  }
  return Tell(request.run(), request.json);
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
