// A directory that replaces the root of the file system: it has only what the test writes.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace hybridopt {

class FakeRoot {
 public:
  FakeRoot() {
    path_ = testing::TempDir() + "hybridopt-root-XXXXXX";
    if (mkdtemp(path_.data()) == nullptr) std::abort();
  }
  ~FakeRoot() { std::filesystem::remove_all(path_); }
  FakeRoot(const FakeRoot&) = delete;
  FakeRoot& operator=(const FakeRoot&) = delete;
  const std::string& path() const { return path_; }

  void Write(const std::string& file, const std::string& text) const {
    const std::filesystem::path whole(path_ + file);
    std::filesystem::create_directories(whole.parent_path());
    std::ofstream(whole) << text;
  }

  void WriteNode(uint32_t node, const std::string& cpus, const std::string& distances = "") const {
    const std::string directory = "/sys/devices/system/node/node" + std::to_string(node);
    Write(directory + "/cpulist", cpus + "\n");
    if (!distances.empty()) Write(directory + "/distance", distances + "\n");
  }
  // "online", "has_memory"
  void WriteNodeList(const std::string& file, const std::string& list) const {
    Write("/sys/devices/system/node/" + file, list + "\n");
  }
  void WritePciDevice(const std::string& id, int node, const std::string& cpus) const {
    const std::string directory = "/sys/bus/pci/devices/" + id;
    Write(directory + "/numa_node", std::to_string(node) + "\n");
    Write(directory + "/local_cpulist", cpus + "\n");
  }
  void WriteAllowedMemory(const std::string& list) const {
    Write("/proc/self/status", "Name:\tx\nMems_allowed:\t0\nMems_allowed_list:\t" + list +
                                   "\nvoluntary_ctxt_switches:\t1\n");
  }

 private:
  std::string path_;
};

}  // namespace hybridopt
