// Writes the golden checkpoints into a directory. To be used only for those of a new format
// version: the existing ones never change. Usage: make_golden DIRECTORY
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
