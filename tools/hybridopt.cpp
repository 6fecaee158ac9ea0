// hybridopt: reports what this machine can do and how much memory optimizer state takes; lists,
// verifies, reshards and exports checkpoints. Exit codes: 0 done, 1 the answer is no (the
// checkpoint is damaged or does not hold what was asked for, there is no checkpoint, the training
// does not fit), 2 wrong usage (a word, an option or a path), 3 could not be done.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <iostream>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "base/utf8.h"
#include "commands.h"
#include "plan_bytes.h"
#include "text.h"

namespace tool {
namespace {

constexpr int kAnswerIsNo = 1;
constexpr int kUsage = 2;
constexpr uint64_t kBytesLeastWithoutUnit = uint64_t{1} << 20;
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

// The exit code of a command with this one, unless standard output could not be written.
int Written(int exit_code) {
  std::cout.flush();
  if (std::cout.good()) return exit_code;
  std::cerr << "hybridopt: could not write to standard output\n";
  return 3;
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
  const bool is_no = result.ok() && !status.ok();
  return Written(is_no ? kAnswerIsNo : ExitCode(status));
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
  command->group("Commands");
  command->callback([&request, run] { request.run = run; });
  command->add_flag("--json", request.json, "prints one JSON object instead of text");
  return command;
}

// The same check. If it fails, the error text says what was got and what is expected.
CLI::Validator Expecting(const std::string& expected, const CLI::Validator& check) {
  const auto run = [expected, check](std::string& text) {
    const std::string got = text;
    bool good = false;
    try {
      good = check(text).empty();
    } catch (const CLI::ValidationError&) {
    }
    return good ? "" : "got " + Quoted(got) + ", expected " + expected;
  };
  return {run, ""};
}

// "cuda, sim or none"
std::string OneOf(const std::vector<std::string>& words) {
  std::string text;
  for (size_t i = 0; i < words.size(); ++i)
    text += (i == 0 ? "" : i + 1 == words.size() ? " or " : ", ") + words[i];
  return text;
}

CLI::Validator AnyOf(const std::vector<std::string>& words) {
  return Expecting(OneOf(words), CLI::IsMember(words));
}

// A number that may have a fraction. CLI::Range accepts NaN.
CLI::Validator NumberFrom(double least, double most, const std::string& expected) {
  const auto check = [least, most](std::string& text) -> std::string {
    char* end = nullptr;
    const double number = std::strtod(text.c_str(), &end);
    return !text.empty() && *end == '\0' && number >= least && number <= most ? "" : "no";
  };
  return Expecting(expected, {check, ""});
}

CLI::Validator Fraction() { return NumberFrom(0, 1, "a number from 0 to 1"); }

CLI::Validator CountTo(int most) {
  return Expecting("a whole number from 1 to " + std::to_string(most), CLI::Range(1, most));
}

// An error text about a few bytes without a unit: who gives 80 for a GPU means 80GiB. Else empty.
std::string NoUnit(const std::string& given) {
  char* end = nullptr;
  const uint64_t bytes = std::strtoull(given.c_str(), &end, 10);
  if (*end != '\0' || given.starts_with('-') || bytes == 0 || bytes >= kBytesLeastWithoutUnit)
    return "";
  const std::string number = std::to_string(bytes);
  return "got " + Quoted(given) + ", which is " + Counted(bytes, "byte") + "; write a unit, as " +
         number + "GiB, or " + number + "B for so few";
}

// Adds an option that is a number of bytes.
CLI::Option* AddSize(CLI::App* command, const char* name, uint64_t& bytes, const char* text) {
  const CLI::AsSizeValue size(true);  // a kB has 1000 bytes
  const auto check = [size](std::string& given) {
    // Without the second condition, a negative number would be read as a very large one.
    return given.starts_with('-') ? "no" : size(given);
  };
  command->footer("A SIZE is a whole number with a unit, as 8GiB, 1536MiB or 2GB.");
  return command->add_option(name, bytes, text)
      ->transform(Expecting("a whole number with a unit, as 8GiB, 1536MiB or 2GB", {check, ""}))
      ->transform({NoUnit, ""})  // CLI11 begins with the last one
      ->option_text("SIZE");
}

// Adds a word or an option that is a path.
CLI::Option* AddPath(CLI::App* command, const char* name, std::string& path, const char* text) {
  const auto check = [](std::string& given) { return given.empty() ? "no" : ""; };
  return command->add_option(name, path, text)
      ->type_name("")
      ->check(Expecting("a path", {check, ""}));
}

CLI::Option* AddDevice(CLI::App* command, std::string& device) {
  return command
      ->add_option("--device", device,
                   "device beside the host: cuda, sim or none; by default the GPU if there\n"
                   "is one. sim, a simulated device, shows only that the command works")
      ->check(AnyOf({"cuda", "sim", "none"}))
      ->option_text("DEVICE");
}

CLI::Option* AddOffloadFraction(CLI::App* command, auto& fraction, const char* text) {
  return command->add_option("--offload-fraction", fraction, text)
      ->check(Fraction())
      ->option_text("FRACTION");
}

constexpr char kSmallState[] = "split masters of bf16 params, and bf16 moments";

void AddDoctor(CLI::App& app, Request& request) {
  const auto options = std::make_shared<DoctorOptions>();
  CLI::App* const doctor = AddCommand(
      app, request, "doctor", "measures what this machine can do, and says what holds it back",
      [options] { return Doctor(*options); });
  AddPath(doctor, "DIR", options->directory, "a directory whose disk is measured too");
  AddDevice(doctor, options->device);
  AddSize(doctor, "--memory", options->memory_bytes,
          "the most to take; by default an eighth of what is available, at most\n"
          "4 GiB, and half of what is available to see how much can be pinned");
}

void AddBench(CLI::App& app, Request& request) {
  const auto options = std::make_shared<BenchOptions>();
  CLI::App* const bench =
      AddCommand(app, request, "bench", "measures steps against what memory and link allow here",
                 [options] { return Bench(*options); });
  AddDevice(bench, options->device);
  AddSize(bench, "--memory", options->memory_bytes,
          "the most to take; by default an eighth of what is available, at most\n4 GiB");
  bench
      ->add_option("--seconds", options->seconds,
                   "how long to measure, about: 0 to 3600, by default 30")
      ->check(NumberFrom(0, 3600, "a number of seconds from 0 to 3600, as 30"))
      ->option_text("SECONDS");
}

void AddTrace(CLI::App& app, Request& request) {
  const auto options = std::make_shared<TraceOptions>();
  CLI::App* const trace = AddCommand(
      app, request, "trace", "records steps for ui.perfetto.dev, and tells where their time went",
      [options] { return Trace(*options); });
  AddPath(trace, "FILE", options->path, "the JSON file to make; with --read the one to read")
      ->required();
  CLI::Option* const read =
      trace->add_flag("--read", options->read,
                      "prints the table of a trace that is there, as of a training of yours;\n"
                      "nothing is recorded");
  trace
      ->add_option("--params", options->params,
                   "params of the training that is recorded, by default 64M: a number or a\n"
                   "model, as for plan")
      ->excludes(read)
      ->option_text("MODEL");
  trace->add_option("--steps", options->steps, "steps that are recorded: 1 to 1000, by default 3")
      ->excludes(read)
      ->check(CountTo(1000))
      ->option_text("STEPS");
  AddDevice(trace, options->device)->excludes(read);
  AddOffloadFraction(trace, options->offload_fraction,
                     "share of the state on the host, 0 to 1, by default 1; without a device\n"
                     "all of it is there")
      ->excludes(read);
  trace->add_flag("--small-state", options->small_state, kSmallState)->excludes(read);
}

void AddTrainingOfPlan(CLI::App* plan, PlanOptions& options) {
  plan->add_flag("--hook-gradients", options.hook_gradients,
                 "gradients leave during the backward pass, and take room on the host");
  AddSize(plan, "--early-updates", options.early_bytes,
          "memory on the host for early updates, by default 0; needs\n--hook-gradients");
  AddSize(plan, "--activations", options.activations_bytes,
          "activations kept for the backward pass, on the device; by default 0");
  AddSize(plan, "--stash", options.stash_bytes,
          "budget of an activation stash, on the host; by default 0");
}

void AddMachineOfPlan(CLI::App* plan, PlanOptions& options) {
  plan->add_option("--gpus", options.gpus,
                   "ranks of one host that share params, gradients and state, as with\n"
                   "FSDP2: 1 to 1024, by default 1")
      ->check(CountTo(1024))
      ->option_text("GPUS");
  AddPath(plan, "--machine", options.machine,
          "what 'hybridopt doctor --json > FILE' wrote on the machine, for its\n"
          "memory and the time of a step")
      ->option_text("FILE");
  AddSize(plan, "--host-memory", options.host_memory_bytes,
          "of another machine; by default what is available here");
  AddSize(plan, "--device-memory", options.device_memory_bytes,
          "of each GPU of another machine; by default what is free on one here");
}

void AddPlan(CLI::App& app, Request& request) {
  const auto options = std::make_shared<PlanOptions>();
  CLI::App* const plan = AddCommand(
      app, request, "plan", "tells what a model's state takes, what fits, and the line of Python",
      [options] { return Plan(*options); });
  plan->add_option("MODEL", options->model,
                   "a number of parameters (7e9, 7B), a well-known model (qwen3-8b),\n"
                   "a config.json, safetensors, or a directory of these")
      ->type_name("")
      ->required();
  plan->add_option("--algorithm", options->algorithm,
                   "the optimizer: " + OneOf(AlgorithmNames()) + ";\nby default adamw")
      ->check(AnyOf(AlgorithmNames()))
      ->option_text("NAME");
  plan->add_option("--dtype", options->dtype,
                   "dtype of params and gradients: fp32, bf16 or fp16; by default bf16")
      ->check(AnyOf({"fp32", "bf16", "fp16"}))
      ->option_text("DTYPE");
  CLI::Option* const offloaded =
      AddOffloadFraction(plan, options->offload_fraction,
                         "share of the state on the host, 0 to 1; by default the table has the\n"
                         "least that fits, and the lines above it are for 1");
  plan->add_option("--device-fraction", options->device_fraction,
                   "1 less the offload fraction: the same choice in C and Rust")
      ->excludes(offloaded)
      ->check(Fraction())
      ->option_text("FRACTION");
  plan->add_flag("--small-state", options->small_state, kSmallState);
  plan->add_option("--master-layout", options->master_layout,
                   "how the fp32 masters of bf16 params are kept: fp32, 4 bytes an\n"
                   "element, split, 2 bytes and the same masters, or split24, 1 byte and\n"
                   "masters of 24 bits; by default the table has fp32 and split")
      ->check(AnyOf(MasterLayoutNames()))
      ->option_text("LAYOUT");
  AddTrainingOfPlan(plan, *options);
  AddMachineOfPlan(plan, *options);
}

void AddCheckpointCommands(CLI::App& app, Request& request) {
  const auto list = std::make_shared<ListOptions>();
  AddPath(AddCommand(app, request, "list", "lists the checkpoints in a directory",
                     [list] { return List(*list); }),
          "DIR", list->directory, "a directory that holds checkpoints")
      ->required();

  const auto newest = std::make_shared<NewestOptions>();
  CLI::App* const finding =
      AddCommand(app, request, "newest", "prints the path of the good checkpoint of the last step",
                 [newest] { return Newest(*newest); });
  AddPath(finding, "DIR", newest->directory, "a directory that holds checkpoints")->required();
  finding->add_flag("--verify", newest->verify,
                    "reads every byte before it calls a checkpoint good");

  const auto inspect = std::make_shared<InspectOptions>();
  AddPath(AddCommand(app, request, "inspect",
                     "lists the tensors of a checkpoint; reads manifest and headers alone",
                     [inspect] { return Inspect(*inspect); }),
          "DIR", inspect->directory, "a checkpoint")
      ->required();

  const auto verify = std::make_shared<VerifyOptions>();
  AddPath(AddCommand(app, request, "verify",
                     "reads every byte, compares every hash, names what is damaged",
                     [verify] { return Verify(*verify); }),
          "DIR", verify->directory, "a checkpoint")
      ->required();

  const auto reshard = std::make_shared<ReshardOptions>();
  CLI::App* const resharding =
      AddCommand(app, request, "reshard",
                 "writes the same state as another number of ranks would have saved it",
                 [reshard] { return Reshard(*reshard); });
  AddPath(resharding, "DIR", reshard->directory, "a checkpoint")->required();
  AddPath(resharding, "OUT", reshard->out, "the checkpoint to make")->required();
  resharding
      ->add_option("--world", reshard->world,
                   "ranks, 1 to 65536, which must be given; each gets an even range of\n"
                   "every tensor; with 1, whole tensors")
      ->required()
      ->check(CountTo(65536))
      ->option_text("RANKS");

  const auto exported = std::make_shared<ExportOptions>();
  CLI::App* const exporting = AddCommand(
      app, request, "export", "writes one kind of state as one safetensors file of whole tensors",
      [exported] { return Export(*exported); });
  AddPath(exporting, "DIR", exported->directory, "a checkpoint")->required();
  AddPath(exporting, "OUT", exported->out, "the safetensors file to make")->required();
  const std::vector<std::string> kinds = {"master", "exp_avg", "exp_avg_sq", "momentum_buffer",
                                          "sum"};
  exporting
      ->add_option("--what", exported->what,
                   "kind of state: " + OneOf(kinds) + ";\nby default master")
      ->check(AnyOf(kinds))
      ->option_text("KIND");
  exporting
      ->add_option(
          "--dtype", exported->dtype,
          "dtype of the elements, rounded to nearest: fp32, bf16 or fp16;\nby default fp32")
      ->check(AnyOf({"fp32", "bf16", "fp16"}))
      ->option_text("DTYPE");
}

// "'pla': no such command; did you mean 'plan'?"
std::string NoSuch(const char* what, const std::string& word,
                   const std::vector<std::string>& words) {
  const std::string nearest = NearestWord(word, words);
  return Quoted(word) + ": no such " + what +
         (nearest.empty() ? "" : "; did you mean '" + nearest + "'?");
}

// The word that should be a command, which may also stand behind `help`; null if there is none.
const std::string* CommandOf(const std::vector<std::string>& words) {
  const size_t place = !words.empty() && words[0] == "--help" ? 1 : 0;
  return words.size() > place && !words[place].starts_with('-') ? &words[place] : nullptr;
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
    return Quoted(word) + " was not expected: no more words belong here";
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

// The error text about an option that has too many values or too few, or about what is missing.
std::string WrongText(const CLI::ParseError& error) {
  const std::string text = hybridopt::Printable(error.what());
  const std::string option = text.substr(std::min(text.find("--"), text.size()));
  switch (static_cast<CLI::ExitCodes>(error.get_exit_code())) {
    case CLI::ExitCodes::ArgumentMismatch:
      return option.substr(0, option.find(':')) + " takes one value, and is given once";
    case CLI::ExitCodes::ConversionError:  // values of other options are checked before
      return option.substr(0, option.find_first_of(" :")) + " takes no value";
    default:
      return text;
  }
}

// Also --help and --version come here.
int WrongUsage(const CLI::App& app, const CLI::ParseError& error,
               const std::vector<std::string>& words) {
  if (error.get_exit_code() == 0) return Written(app.exit(error));
  const std::vector<CLI::App*> commands = app.get_subcommands();
  const CLI::App& command = commands.empty() ? app : *commands[0];
  const std::string name = commands.empty() ? "hybridopt" : "hybridopt " + command.get_name();
  if (commands.empty() || error.get_exit_code() == static_cast<int>(CLI::ExitCodes::ExtrasError))
    for (const std::string& word : words) {  // in this order, which CLI11's list does not have
      if (IsIn(app.remaining(), word)) return Refuse("hybridopt", UnknownWord(app, word));
      if (IsIn(command.remaining(), word)) return Refuse(name, UnknownWord(command, word));
    }
  return Refuse(name, commands.empty() ? "a command is required, such as 'hybridopt plan 8B'"
                                       : WrongText(error));
}

// The words after the program's name. `help` and `version` are commands of many other tools.
std::vector<std::string> WordsOf(int argc, char** argv) {
  std::vector<std::string> words(argv + 1, argv + argc);
  if (!words.empty() && (words[0] == "help" || words[0] == "version")) words[0].insert(0, "--");
  return words;
}

int Main(int argc, char** argv) {
  CLI::App app(
      "Optimizer state in host memory: what it takes on this machine, and its checkpoints.",
      "hybridopt");
  app.set_help_flag("-h,--help", "prints this text");
  app.set_version_flag("--version", "hybridopt " HYBRIDOPT_VERSION, "prints the version");
  app.require_subcommand(1);
  app.get_formatter()->label("SUBCOMMAND", "COMMAND");
  app.get_formatter()->label("Positionals", "Words");
  Request request;
  AddCommand(app, request, "info", "tells of this library, this machine and its GPU", Info);
  AddDoctor(app, request);
  AddBench(app, request);
  AddTrace(app, request);
  AddPlan(app, request);
  AddCheckpointCommands(app, request);
  app.footer(
      "'hybridopt COMMAND --help' has the options of a command, which stand behind its name.");
  const std::vector<std::string> words = WordsOf(argc, argv);
  const std::string* const command = CommandOf(words);
  const std::string wrong = command != nullptr ? UnknownCommand(app, *command) : "";
  if (!wrong.empty()) return Refuse("hybridopt", wrong);
  try {
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));  // as CLI11 takes them
  } catch (const CLI::ParseError& error) {
    return WrongUsage(app, error, words);
  }
  return Tell(request.run(), request.json);
}

std::terminate_handler terminate_as_usual = nullptr;

// nlohmann's json allocates while it is freed, in a destructor, out of which no exception comes.
[[noreturn]] void Terminate() {
  try {
    if (std::current_exception() != nullptr) throw;
  } catch (const std::bad_alloc&) {
    std::fputs("hybridopt: out of memory\n", stderr);
    std::_Exit(3);
  } catch (...) {
  }
  terminate_as_usual();
  std::abort();
}

}  // namespace
}  // namespace tool

int main(int argc, char** argv) {
  tool::terminate_as_usual = std::set_terminate(tool::Terminate);
  try {
    return tool::Main(argc, argv);
  } catch (const std::bad_alloc&) {
    std::fputs("hybridopt: out of memory\n", stderr);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "hybridopt: %s\n", error.what());
  }
  return 3;
}
