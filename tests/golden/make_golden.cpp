// Writes the golden checkpoints into a directory. Only for those of a new format version: the ones
// that are there stay as they are. Usage: make_golden DIRECTORY
#include <cstdio>

#include "golden.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: make_golden DIRECTORY\n");
    return 2;
  }
  for (const auto& golden : hybridopt::checkpoint::Goldens())
    golden.made.Write(std::string(argv[1]) + "/" + golden.name);
  return 0;
}
