#include <algorithm>
#include <cmath>
#include <optional>
#include <sstream>
#include <vector>

#include "base/system.h"
#include "base/utf8.h"
#include "commands.h"
#include "machine_file.h"
#include "model.h"
#include "plan_bytes.h"
#include "text.h"

namespace tool {
namespace {

constexpr int kHundred = 100;  // fractions are tried in hundredths
// The part of the device that a chosen fraction leaves free, because allocators round sizes up and
// lose fragments.
constexpr uint64_t kReservePercent = 5;

// A way to store the state.
struct NamedLayout {
  const char* text;
  const char* masters;
  bool bf16_moments;
  const char* rates;  // the name under which doctor has measured it
};
constexpr NamedLayout kNamedLayouts[] = {
    {"fp32 state", "fp32", false, "fp32"},
    {"split masters, same bits", "split", false, "split"},
    {"split masters, bf16 moments", "split", true, "small"},
    {"fp32 masters, bf16 moments", "fp32", true, ""},
    {"masters of 24 bits", "split24", false, ""},
    {"masters of 24 bits, bf16 moments", "split24", true, ""},
};
constexpr size_t kExactLayouts = 2;    // the first ones keep the same bits
constexpr size_t kOfferedLayouts = 3;  // of bf16 params, if the options choose none

// The question that the command line asks.
struct Question {
  PlanOptions options;
  Model model;
  uint64_t elements = 0;  // of a rank
  double offload_fraction = 1;
  bool is_fraction_open = false;
  uint64_t host_available_bytes = 0;    // for all ranks
  uint64_t device_available_bytes = 0;  // 0: not known
  std::optional<MachineFile> machine;
};

struct Fit {
  bool device = true;
  bool host = true;
  bool both() const { return device && host; }
};

// The predicted seconds of a step. They differ if several ranks share the host.
struct Seconds {
  double least = 0;
  double most = 0;
};

// One choice of fraction and layout, and whether the training fits with it.
struct Candidate {
  std::string text;
  StateChoice choice;
  StateBytes state;
  TrainingBytes training;
  Fit fit;
  std::optional<Seconds> seconds;
  bool is_exact = true;
};

bool ChoosesFraction(const Question& question) {
  return question.is_fraction_open && question.device_available_bytes != 0;
}

Fit FitOf(const Question& question, const TrainingBytes& training) {
  const uint64_t available = question.device_available_bytes;
  const uint64_t reserve = ChoosesFraction(question) ? available / kHundred * kReservePercent : 0;
  return {available == 0 || training.device + reserve <= available,
          training.host * question.options.gpus <= question.host_available_bytes};
}

std::optional<Seconds> Predict(const Question& question, const char* rates, double fraction) {
  const PlanOptions& options = question.options;
  if (!question.machine || options.algorithm != "adamw" || options.dtype != "bf16") return {};
  const auto elements = static_cast<double>(question.elements);
  const std::optional<double> seconds =
      question.machine->StepSeconds(rates, elements * fraction, elements * (1 - fraction));
  if (!seconds) return {};
  return Seconds{*seconds, *seconds * options.gpus};
}

Result<Candidate> CandidateOf(Planner& planner, const Question& question, const NamedLayout& layout,
                              double fraction) {
  Candidate candidate;
  candidate.text = layout.text;
  candidate.choice = {fraction, layout.masters, layout.bf16_moments};
  HYBRIDOPT_ASSIGN(candidate.state, planner.State(question.elements, candidate.choice));
  candidate.training = planner.Training(question.elements, candidate.state);
  candidate.fit = FitOf(question, candidate.training);
  candidate.seconds = Predict(question, layout.rates, fraction);
  return candidate;
}

// Finds the least fraction with which the training fits on the device; 1 if none does.
Result<Candidate> LeastOffloaded(Planner& planner, const Question& question,
                                 const NamedLayout& layout) {
  int fits = kHundred, too_little = -1;
  while (fits - too_little > 1) {
    const int middle = (fits + too_little) / 2;
    HYBRIDOPT_ASSIGN(
        const Candidate candidate,
        CandidateOf(planner, question, layout, static_cast<double>(middle) / kHundred));
    (candidate.fit.device ? fits : too_little) = middle;
  }
  return CandidateOf(planner, question, layout, static_cast<double>(fits) / kHundred);
}

// The layouts that the options allow. Only bf16 params can have other masters than fp32.
std::vector<NamedLayout> LayoutsOf(const PlanOptions& options) {
  const NamedLayout* const first = kNamedLayouts;
  const bool is_bf16 = options.dtype == "bf16";
  if (is_bf16 && options.master_layout.empty() && !options.small_state)
    return {first, first + kOfferedLayouts};
  const std::string masters = !options.master_layout.empty()   ? options.master_layout
                              : is_bf16 && options.small_state ? "split"
                                                               : "fp32";
  const auto* const chosen = std::find_if(first, std::end(kNamedLayouts), [&](const auto& layout) {
    return layout.masters == masters && layout.bf16_moments == options.small_state;
  });
  return {*chosen};
}

Result<std::vector<Candidate>> CandidatesOf(Planner& planner, const Question& question) {
  std::vector<Candidate> candidates;
  for (const NamedLayout& layout : LayoutsOf(question.options)) {
    HYBRIDOPT_ASSIGN(Candidate candidate,
                     ChoosesFraction(question)
                         ? LeastOffloaded(planner, question, layout)
                         : CandidateOf(planner, question, layout, question.offload_fraction));
    candidate.is_exact = candidates.size() < kExactLayouts;
    candidates.push_back(std::move(candidate));
  }
  return candidates;
}

// Prefers exact layouts. Among these it takes the fastest, or the one that offloads less if no
// speed is known.
const Candidate* BestOf(const std::vector<Candidate>& candidates) {
  const Candidate* best = nullptr;
  const auto cost = [](const Candidate& candidate) {
    return candidate.seconds ? candidate.seconds->least : candidate.choice.offload_fraction;
  };
  for (const Candidate& candidate : candidates) {
    if (!candidate.fit.both()) continue;
    if (best == nullptr || (candidate.is_exact && cost(candidate) < cost(*best))) best = &candidate;
  }
  return best;
}

// ------------------------------------------------------------------------------------ question --

// The free memory on the GPU of this machine; 0 without a GPU.
uint64_t DeviceFreeBytes() {
  Context context;
  auto options = offload_init<offload_context_options_t>();
  options.device_kind = OFFLOAD_DEVICE_CUDA;
  auto info = offload_init<offload_context_info_t>();
  if (!context.Create(options).ok() || offload_context_get_info(context.get(), &info) != OFFLOAD_OK)
    return 0;
  return info.device_memory_free_bytes;
}

Result<Question> QuestionOf(const PlanOptions& options) {
  Question question;
  question.options = options;
  question.is_fraction_open = !options.offload_fraction && !options.device_fraction;
  question.offload_fraction =
      options.offload_fraction.value_or(1 - options.device_fraction.value_or(0));
  HYBRIDOPT_ASSIGN(question.model, FindModel(options.model));
  question.elements = (question.model.elements + options.gpus - 1) / options.gpus;
  if (!options.machine.empty()) {
    HYBRIDOPT_ASSIGN(question.machine, MachineFile::Read(options.machine));
    question.host_available_bytes = question.machine->host_available_bytes();
    question.device_available_bytes = question.machine->device_free_bytes();
  } else {
    question.host_available_bytes = hybridopt::system::AvailableBytes();
    question.device_available_bytes = DeviceFreeBytes();
  }
  if (options.host_memory_bytes != 0) question.host_available_bytes = options.host_memory_bytes;
  if (options.device_memory_bytes != 0)
    question.device_available_bytes = options.device_memory_bytes;
  return question;
}

// ---------------------------------------------------------------------------------------- text --

std::string Grouped(uint64_t number) {
  std::string text = std::to_string(number);
  for (auto at = static_cast<std::ptrdiff_t>(text.size()) - 3; at > 0; at -= 3)
    text.insert(static_cast<size_t>(at), ",");
  return text;
}

// "fits into 128.0 GiB, 9.1 GiB are left for the program"
std::string FitText(uint64_t needed, uint64_t available, const char* what_for) {
  if (needed > available)
    return "does not fit into " + SizeText(available) + ", " + SizeText(needed - available) +
           " are missing";
  return "fits into " + SizeText(available) + ", " + SizeText(available - needed) + " are left " +
         what_for;
}

std::string TrainingText(const Question& question, const TrainingBytes& training) {
  const PlanOptions& options = question.options;
  std::ostringstream out;
  out << "training  on " << (options.gpus > 1 ? "each" : "the") << " device "
      << SizeText(training.device) << ": params and "
      << (options.hook_gradients ? "at most as much of gradients " : "gradients ")
      << SizeText(2 * training.params) << ", activations "
      << (options.activations_bytes == 0 ? "not counted (--activations)"
                                         : SizeText(training.activations))
      << "; "
      << (question.device_available_bytes == 0
              ? std::string(question.machine ? "that machine has no GPU"
                                             : "no GPU is found here (hybridopt doctor says why)") +
                    ", --device-memory says how much another one has"
              : FitText(training.device, question.device_available_bytes, "there"))
      << "\n          on the host " << SizeText(training.host * options.gpus) << ": "
      << (options.gpus > 1 ? std::to_string(options.gpus) + " times " : "") << "state "
      << (options.hook_gradients ? "and gradients " : "")
      << SizeText(training.host - training.early - training.stash)
      << (training.early > 0 ? ", early updates " + SizeText(training.early) : "") << ", stash "
      << SizeText(training.stash) << "; "
      << FitText(training.host * options.gpus, question.host_available_bytes,
                 "for the program itself")
      << "\n";
  return out.str();
}

std::string PlanText(const Question& question, const Candidate& asked) {
  const PlanOptions& options = question.options;
  std::ostringstream out;
  out << options.algorithm << " over " << Grouped(question.model.elements) << " elements of "
      << options.dtype;
  if (!question.model.source.empty())
    out << " (" << hybridopt::Printable(question.model.source) << ")";
  out << ", " << std::lround(kHundred * question.offload_fraction)
      << " % of the state on the host\n";
  if (options.gpus > 1)
    out << "each of " << options.gpus << " GPUs has " << Grouped(question.elements)
        << " of them, with their gradients and state:\n";
  out << "host      " << SizeText(Rounded(asked.state.host)) << ", of it "
      << SizeText(Rounded(asked.state.pinned)) << " pinned\n"
      << "device    " << SizeText(Rounded(asked.state.device)) << ", of it "
      << SizeText(Rounded(asked.state.ring)) << " for state that streams\n"
      << "per step  " << SizeText(Rounded(asked.state.down)) << " down, "
      << SizeText(Rounded(asked.state.up)) << " up, if CPU threads update the host's share\n"
      << TrainingText(question, asked.training);
  return out.str();
}

std::string SecondsText(const std::optional<Seconds>& seconds) {
  if (!seconds) return "-";
  if (seconds->least == seconds->most) return NumberText(seconds->least) + " s";
  return NumberText(seconds->least) + " to " + NumberText(seconds->most) + " s";
}

std::string FractionText(double fraction) {
  std::ostringstream out;
  out << fraction;
  return out.str();
}

std::string FitWord(const Fit& fit) {
  if (fit.both()) return "yes";
  return fit.host ? "not on the device" : fit.device ? "not on the host" : "on neither";
}

std::string CandidatesText(const Question& question, const std::vector<Candidate>& candidates) {
  using Align = Table::Align;
  Table table({{"state", Align::kLeft},
               {"offload_fraction", Align::kRight},
               {"device", Align::kRight},
               {"host", Align::kRight},
               {"step", Align::kRight},
               {"fits", Align::kLeft}});
  for (const Candidate& candidate : candidates)
    table.Add({candidate.text, FractionText(candidate.choice.offload_fraction),
               SizeText(candidate.training.device),
               SizeText(candidate.training.host * question.options.gpus),
               SecondsText(candidate.seconds), FitWord(candidate.fit)});
  std::ostringstream out;
  out << "\n";
  table.Print(out);
  if (ChoosesFraction(question))
    out << "offload_fraction: the least that leaves " << kReservePercent << " % of the device free"
        << (question.options.activations_bytes == 0 ? ", without activations (--activations)" : "")
        << "\n";
  const Candidate& first = candidates.front();
  if (ChoosesFraction(question) && first.fit.both() && first.choice.offload_fraction == 0)
    out << "all state fits on the device: no offload is needed"
        << (question.options.activations_bytes == 0 ? " if the activations fit too" : "") << "\n";
  if (question.machine)
    out << "step: predicted from the rates that doctor measured over "
        << Grouped(question.machine->elements()) << " params on "
        << hybridopt::Printable(question.machine->date())
        << (question.machine->is_simulated() ? ", with a simulated device" : "")
        << (question.options.gpus > 1 ? "; the lower number if no rank disturbs another, the upper "
                                        "one if they share all"
                                      : "")
        << "; nothing was run\n";
  return out.str();
}

// The statement of Python that makes this optimizer.
std::string PythonOf(const Question& question, const Planner& planner, const StateChoice& choice) {
  std::ostringstream out;
  out << "optimizer = hybridopt." << planner.algorithm().name
      << "(model.named_parameters(), lr=1e-4"
      << (planner.algorithm().value == OFFLOAD_SGD ? ", momentum=0.9" : "")
      << ", offload_fraction=" << choice.offload_fraction;
  if (choice.masters != "fp32") out << ", master_layout=\"" << choice.masters << "\"";
  if (choice.bf16_moments) out << ", state_dtype=\"bf16\"";
  if (question.options.early_bytes > 0)
    out << ", early_update_bytes=" << question.options.early_bytes;
  out << ")";
  if (question.options.hook_gradients) out << "\noptimizer.hook_gradients()";
  return out.str();
}

// ---------------------------------------------------------------------------------------- JSON --

Json FitJson(uint64_t needed, uint64_t available) {
  return available == 0 ? Json(nullptr) : Json(needed <= available);
}

Json SecondsJson(const std::optional<Seconds>& seconds) {
  return seconds ? Json({seconds->least, seconds->most}) : Json(nullptr);
}

Json PlanJson(const Question& question, const Candidate& asked) {
  const TrainingBytes& training = asked.training;
  const uint64_t all_host = training.host * question.options.gpus;
  return {{"status", offload_status_name(OFFLOAD_OK)},
          {"elements", question.model.elements},
          {"source", question.model.source},
          {"gpus", question.options.gpus},
          {"elements_of_a_rank", question.elements},
          {"host_bytes", Rounded(asked.state.host)},
          {"pinned_bytes", Rounded(asked.state.pinned)},
          {"device_bytes", Rounded(asked.state.device)},
          {"device_ring_bytes", Rounded(asked.state.ring)},
          {"grads_down_bytes", Rounded(asked.state.down)},
          {"params_up_bytes", Rounded(asked.state.up)},
          {"training_device_bytes", training.device},
          {"training_host_bytes", training.host},
          {"all_ranks_host_bytes", all_host},
          {"params_bytes", training.params},
          {"activations_on_device_bytes", training.activations},
          {"early_updates_bytes", training.early},
          {"stash_bytes", training.stash},
          {"device_available_bytes", question.device_available_bytes},
          {"host_available_bytes", question.host_available_bytes},
          {"device_fits", FitJson(training.device, question.device_available_bytes)},
          {"host_fits", FitJson(all_host, question.host_available_bytes)},
          {"predicted_step_seconds", SecondsJson(asked.seconds)}};
}

Json CandidatesJson(const Question& question, const std::vector<Candidate>& candidates) {
  Json rows = Json::array();
  for (const Candidate& candidate : candidates)
    rows.push_back({{"master_layout", candidate.choice.masters},
                    {"state_dtype", candidate.choice.bf16_moments ? "bf16" : "fp32"},
                    {"offload_fraction", candidate.choice.offload_fraction},
                    {"device_bytes", candidate.training.device},
                    {"all_ranks_host_bytes", candidate.training.host * question.options.gpus},
                    {"predicted_step_seconds", SecondsJson(candidate.seconds)},
                    {"fits", candidate.fit.both()}});
  return rows;
}

// What takes less of the device, of what the options do not have yet.
std::string DeviceAdvice(const Question& question) {
  const PlanOptions& options = question.options;
  std::string text = "; on the device more --gpus share params, gradients and state";
  if (!question.is_fraction_open && question.offload_fraction < 1)
    text += ", a larger --offload-fraction takes state off it";
  if (!options.hook_gradients) text += ", --hook-gradients takes gradients off it";
  if (options.activations_bytes > options.stash_bytes)
    text += ", a larger --stash takes activations off it";
  return text;
}

std::string HostAdvice(const Question& question, const std::vector<Candidate>& candidates) {
  const PlanOptions& options = question.options;
  const bool has_small_state = candidates.back().choice.bf16_moments;
  std::string words;
  if (!has_small_state) words += "--small-state, ";
  if (options.stash_bytes > 0) words += "a smaller --stash, ";
  if (options.early_bytes > 0) words += "smaller --early-updates, ";
  return "; on the host " + words + (words.empty() ? "" : "or ") +
         "the optimizer's option disk_fraction takes less";
}

// Says which side has no room in any of the candidates, and what takes less of it.
Status DoesNotFit(const Question& question, const std::vector<Candidate>& candidates) {
  bool fits_device = false, fits_host = false;
  for (const Candidate& candidate : candidates) {
    fits_device |= candidate.fit.device;
    fits_host |= candidate.fit.host;
  }
  std::string room = SizeText(question.host_available_bytes) + " on the host";
  if (question.device_available_bytes != 0)
    room = SizeText(question.device_available_bytes) + " on the device and " + room;
  return Status::Error(OFFLOAD_OUT_OF_HOST_MEMORY,
                       "nothing that these options leave open fits into %s%s%s", room.c_str(),
                       fits_device ? "" : DeviceAdvice(question).c_str(),
                       fits_host ? "" : HostAdvice(question, candidates).c_str());
}

}  // namespace

Result<Report> Plan(const PlanOptions& options) {
  HYBRIDOPT_ASSIGN(const auto planner, Planner::Make(options));
  HYBRIDOPT_ASSIGN(const Question question, QuestionOf(options));
  HYBRIDOPT_ASSIGN(
      const Candidate asked,
      CandidateOf(*planner, question, LayoutsOf(options).front(), question.offload_fraction));
  HYBRIDOPT_ASSIGN(const auto candidates, CandidatesOf(*planner, question));
  const Candidate* const best = BestOf(candidates);
  Report report;
  report.text = PlanText(question, asked) + CandidatesText(question, candidates);
  report.json = PlanJson(question, asked);
  report.json["choices"] = CandidatesJson(question, candidates);
  report.json["python"] = nullptr;
  if (best == nullptr) {
    report.status = DoesNotFit(question, candidates);
    report.json["status"] = offload_status_name(report.status.code());
    return report;
  }
  const std::string python = PythonOf(question, *planner, best->choice);
  report.text += "\n" + python + "\n";
  report.json["python"] = python;
  return report;
}

}  // namespace tool
