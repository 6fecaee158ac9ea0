// text.h: files to learn from, and windows of them.
#ifndef HYBRIDOPT_EXAMPLES_TRAIN_LM_TEXT_H
#define HYBRIDOPT_EXAMPLES_TRAIN_LM_TEXT_H

#include <filesystem>
#include <fstream>
#include <vector>

#include "../numbers.h"
#include "options.h"
#include "shape.h"

inline constexpr uint64_t kTextBytesMin = 1000000, kTextBytesMax = 64000000;

struct Text {
  std::string where, train, held_out;
  size_t files = 0;
};

inline std::vector<std::string> list_files(const std::string& root, bool headers_only) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (fs::is_regular_file(root, error)) return {root};
  std::vector<std::string> files;
  fs::recursive_directory_iterator at(root, fs::directory_options::skip_permission_denied, error);
  for (; !error && at != fs::recursive_directory_iterator(); at.increment(error)) {
    const std::string suffix = at->path().extension();
    const bool header = suffix == ".h" || suffix == ".hh" || suffix == ".hpp" || suffix == ".hxx";
    std::error_code unreadable;
    if ((header || !headers_only) && at->is_regular_file(unreadable)) files.push_back(at->path());
  }
  if (error) fail("--data: cannot read '" + root + "': " + error.message());
  std::sort(files.begin(), files.end());  // directories list in any order; runs should agree
  return files;
}

inline Text load_text(const std::string& data) {
  Text text;
  text.where = data.empty() ? "/usr/include" : data;
  std::string all;
  for (const std::string& path : list_files(text.where, data.empty())) {
    std::ifstream file(path, std::ios::binary);
    all.append(std::istreambuf_iterator<char>(file), {});
    ++text.files;
    if (all.size() >= kTextBytesMax) break;
  }
  if (all.size() < kTextBytesMin) {
    fail("--data: found " + std::to_string(all.size()) + " bytes of text in '" + text.where +
         "', expected at least 1 MB; name another file or directory with --data");
  }
  all.resize(std::min<size_t>(all.size(), kTextBytesMax));
  constexpr size_t kBlockBytes = 1 << 16;  // every 16th is held out, so both parts are alike
  for (size_t i = 0; i * kBlockBytes < all.size(); ++i) {
    (i % 16 == 8 ? text.held_out : text.train).append(all, i * kBlockBytes, kBlockBytes);
  }
  return text;
}

// Windows at random places.
inline void sample(Batch& batch, const std::string& text, Random& random) {
  for (auto& window : batch.bytes) {
    memcpy(window, text.data() + random.next() % (text.size() - Batch::kStride), Batch::kStride);
  }
}

// The same windows each time: part `index` of `parts` that spread evenly over the text.
inline void sample_evenly(Batch& batch, const std::string& text, int index, int parts) {
  const uint64_t distance = (text.size() - Batch::kStride) / (parts * kBatch);
  for (int row = 0; row < kBatch; ++row) {
    const uint64_t offset = (index * kBatch + row) * distance;
    memcpy(batch.bytes[row], text.data() + offset, Batch::kStride);
  }
}

#endif  // HYBRIDOPT_EXAMPLES_TRAIN_LM_TEXT_H
