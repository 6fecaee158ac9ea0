// options.h: the command line of 04_train_lm.
#ifndef HYBRIDOPT_EXAMPLES_TRAIN_LM_OPTIONS_H
#define HYBRIDOPT_EXAMPLES_TRAIN_LM_OPTIONS_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <string>

#include "../device.h"
#include "../program.h"

struct Options {
  std::string data;  // empty: the C and C++ headers below /usr/include
  int64_t steps = INT64_MAX;
  double seconds = 120;
  uint64_t seed = 1;
  uint32_t threads = 0;
  int replay_steps = 20;
  bool bf16_moments = false;
  std::string device = "auto";
  bool gpu = false;    // what `device` has come to
  std::string killed;  // a directory: be the job that saves there at the middle and is then killed
};

inline constexpr char kHelp[] =
    "04_train_lm: trains a byte-level language model with its AdamW state offloaded\n"
    "  --data FILE_OR_DIR  text to learn (default: the C and C++ headers below /usr/include)\n"
    "  --steps N           train at most N steps (default: as many as the time allows)\n"
    "  --seconds N         train at most N seconds (default 120)\n"
    "  --seed N            of the first weights and the choice of text (default 1)\n"
    "  --threads N         CPU threads, 0 = one per CPU (default 0)\n"
    "  --device KIND       gpu, cpu, or auto: a GPU where there is one (default auto)\n"
    "  --moments KIND      fp32, or bf16 rounded at random (default fp32)\n"
    "  --quick             6 seconds and a short replay: the same output, a worse model\n";

inline Options parse_options(int count, char** arguments) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string flag = arguments[i];
    const char* value = i + 1 < count ? arguments[i + 1] : nullptr;
    if (flag == "--help") {
      fputs(kHelp, stdout);
      exit(0);
    } else if (flag == "--quick") {
      options.seconds = 6;
      options.replay_steps = 5;
      continue;
    } else if (flag == "--killed") {  // not in the help: the program runs itself with it
      if (!value) fail("--killed: got nothing, expected a directory");
      options.killed = value;
    } else if (flag == "--replay-steps") {  // likewise
      options.replay_steps = static_cast<int>(number(flag, value, 4, 1e6));
    } else if (flag == "--data") {
      if (!value) fail("--data: got nothing, expected a file or a directory");
      options.data = value;
    } else if (flag == "--steps") {
      options.steps = static_cast<int64_t>(number(flag, value, 1, 1e9));
    } else if (flag == "--seconds") {
      options.seconds = number(flag, value, 1, 1e6);
    } else if (flag == "--seed") {
      options.seed = static_cast<uint64_t>(number(flag, value, 0, 1e15));
    } else if (flag == "--moments") {
      const std::string kind = value ? value : "nothing";
      if (kind != "fp32" && kind != "bf16")
        fail("--moments: got " + kind + ", expected fp32 or bf16");
      options.bf16_moments = kind == "bf16";
    } else if (flag == "--device") {
      options.device = device_flag(value);
    } else if (flag == "--threads") {
      options.threads = static_cast<uint32_t>(number(flag, value, 0, 1024));
    } else {
      fail(flag + ": no such flag; --help lists them");
    }
    ++i;
  }
  return options;
}

#endif  // HYBRIDOPT_EXAMPLES_TRAIN_LM_OPTIONS_H
