// Opens and verifies a small checkpoint, and one with each kind of damage.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "../../differential/problem.h"
#include "../../fake_root.h"
#include "../../fault/child.h"
#include "../../sample_checkpoint.h"
#include "checkpoint/open_files.h"
#include "checkpoint/reader.h"

namespace hybridopt::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr auto kQuiet = [](uint64_t, uint64_t) {};

class ReaderTest : public testing::Test {
 protected:
  ReaderTest() : path_(root_.path() + "/step-42") { sample_.Write(path_); }

  std::string PathOf(size_t file) const { return path_ + "/" + sample_.manifest.files[file].name; }
  Result<Reader> Open() const { return Reader::Open(system::SystemFiles(), path_); }

  // The message with which Open or Verify refuses the checkpoint; "" if neither refuses it.
  std::string Refusal() const {
    const Result<Reader> reader = Open();
    if (!reader.ok()) return reader.status().message();
    const Result<VerifyResult> result = reader.value().Verify(2, kQuiet);
    return result.ok() ? result.value().status().message() : result.status().message();
  }
  void ExpectOpenRefused(const std::string& says, int32_t code = OFFLOAD_CHECKPOINT_CORRUPT) const {
    const Result<Reader> reader = Open();
    ASSERT_FALSE(reader.ok());
    EXPECT_EQ(reader.status().code(), code);
    EXPECT_NE(reader.status().message().find(says), std::string::npos)
        << reader.status().message() << "\nexpected: " << says;
  }

  FakeRoot root_;
  Sample sample_;
  std::string path_;
};

TEST_F(ReaderTest, AGoodCheckpointIsReadAndProgressIsTold) {
  const Result<Reader> reader = Open();
  ASSERT_TRUE(reader.ok()) << reader.status().message();
  EXPECT_EQ(EncodeManifest(reader.value().manifest()).value(), sample_.text);
  const uint64_t bytes = 3 * 4 * (30 + 32 + 1100);
  EXPECT_EQ(reader.value().bytes(), bytes);
  std::vector<uint64_t> told;
  const Result<VerifyResult> result = reader.value().Verify(1, [&](uint64_t done, uint64_t total) {
    EXPECT_EQ(total, bytes);
    told.push_back(done);
  });
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_TRUE(result.value().status().ok()) << result.value().status().message();
  EXPECT_TRUE(std::is_sorted(told.begin(), told.end()));
  EXPECT_EQ(told.front(), 0u);
  EXPECT_EQ(told.back(), bytes);
}

// A checkpoint of one tensor with one element, and one file, per rank.
void WriteWithRanks(uint32_t world, const std::string& path) {
  HandMade large(OFFLOAD_SGD, world);
  large.manifest.groups = {AdamGroup(0.001, 0)};
  large.kinds = {OFFLOAD_STATE_MASTER};
  large.AddParam("flat", OFFLOAD_FP32, {world});
  for (uint32_t rank = 0; rank < world; ++rank) large.AddShard(rank, 0, {{{0}, {world}}}, rank, 1);
  large.Fill();
  large.Write(path);
}

// Far more files than this process may open.
TEST_F(ReaderTest, FilesAreOpenedAsTheyAreReadAndNotAllStayOpen) {
  constexpr uint32_t kWorld = 300;
  WriteWithRanks(kWorld, root_.path() + "/large");
  fault::InChild([&] {
    const rlimit limit{40, 40};
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    const Result<Reader> reader = Reader::Open(system::SystemFiles(), root_.path() + "/large");
    ASSERT_TRUE(reader.ok()) << reader.status().message();
    OpenFiles files(reader.value());
    for (uint32_t file = 0; file < kWorld; ++file) {
      const Result<std::shared_ptr<File>> opened = files.Get(file);
      ASSERT_TRUE(opened.ok()) << opened.status().message();
      EXPECT_EQ(files.Get(file).value(), opened.value());
    }

    offload_context_options_t context_options{};
    context_options.struct_size = sizeof(context_options);
    context_options.threads = 1;
    offload_context_t context = nullptr;
    ASSERT_EQ(offload_context_create(&context_options, &context), OFFLOAD_OK);
    offload_optimizer_options_t options{};
    options.struct_size = sizeof(options);
    options.algorithm = OFFLOAD_SGD;
    offload_optimizer_t optimizer = nullptr;
    ASSERT_EQ(offload_optimizer_create(context, &options, &optimizer), OFFLOAD_OK);
    offload_group_t group{};
    group.struct_size = sizeof(group);
    uint32_t id = 0;
    ASSERT_EQ(offload_optimizer_add_group(optimizer, &group, &id), OFFLOAD_OK);
    std::vector<float> data(kWorld), expected(kWorld);
    for (uint32_t i = 0; i < kWorld; ++i) expected[i] = Element(0, OFFLOAD_STATE_MASTER, i);
    offload_param_t param{};
    param.struct_size = sizeof(param);
    param.dtype = param.grad_dtype = OFFLOAD_FP32;
    param.name = "flat";
    param.data = data.data();
    param.count = kWorld;
    ASSERT_EQ(offload_optimizer_add_params(optimizer, &param, 1, nullptr), OFFLOAD_OK);
    ASSERT_EQ(offload_optimizer_commit(optimizer, nullptr), OFFLOAD_OK) << offload_last_error();
    offload_load_options_t load{};
    load.struct_size = sizeof(load);
    const std::string path = root_.path() + "/large";
    load.path = path.c_str();
    offload_ticket_t ticket = 0;
    ASSERT_EQ(offload_optimizer_load(optimizer, &load, &ticket), OFFLOAD_OK);
    EXPECT_EQ(offload_optimizer_wait(optimizer, ticket, -1), OFFLOAD_OK) << offload_last_error();
    EXPECT_EQ(data, expected);
    EXPECT_EQ(offload_optimizer_destroy(optimizer), OFFLOAD_OK);
    EXPECT_EQ(offload_context_destroy(context), OFFLOAD_OK);
  });
}

class CountedFiles final : public system::Files {
 public:
  int OpenFile(const std::string& path, Open how) override {
    const int file = Files::OpenFile(path, how);
    if (file >= 0) {
      open += 1;
      opened += 1;
    }
    return file;
  }
  int Close(int file) override {
    open -= 1;
    return Files::Close(file);
  }
  std::atomic<int> open = 0, opened = 0;
};

// A reader that may open any number of files still keeps only a few open, for other users. Files
// that are read often stay open.
TEST_F(ReaderTest, AFewFilesStayOpenHoweverManyMayBe) {
  constexpr int kWorld = 100, kStay = 64;
  WriteWithRanks(kWorld, root_.path() + "/large");
  CountedFiles files;
  const Result<Reader> reader = Reader::Open(files, root_.path() + "/large");
  ASSERT_TRUE(reader.ok()) << reader.status().message();
  EXPECT_EQ(files.open, 0);
  files.opened = 0;
  OpenFiles open(reader.value());
  for (uint32_t file = 0; file < kWorld; ++file) {
    ASSERT_TRUE(open.Get(file).ok());
    ASSERT_TRUE(open.Get(0).ok());
  }
  EXPECT_EQ(files.opened, kWorld);
  EXPECT_EQ(files.open, kStay);
}

// The files of a checkpoint in memory, so that each can be read a hundred thousand times.
class MemoryFiles final : public system::Files {
 public:
  explicit MemoryFiles(const Sample& sample) {
    contents = {sample.text};
    for (const std::string& file : sample.files) contents.push_back(file);
    names_ = {kManifestFile};
    for (const StoredFile& file : sample.manifest.files) names_.push_back(file.name);
  }
  int OpenFile(const std::string& path, Open) override {
    const auto name = std::find(names_.begin(), names_.end(), path.substr(2));
    return name == names_.end() ? -ENOENT : static_cast<int>(name - names_.begin());
  }
  int Close(int) override { return 0; }
  int64_t Size(int file) override { return static_cast<int64_t>(contents[file].size()); }
  int64_t Read(int file, void* data, uint64_t bytes, uint64_t offset) override {
    const std::string& content = contents[file];
    const uint64_t left = content.size() - std::min<uint64_t>(content.size(), offset);
    bytes = std::min(bytes, left);
    std::memcpy(data, content.data() + offset, bytes);
    return static_cast<int64_t>(bytes);
  }

  // The message with which Open or Verify refuses the checkpoint; "" if neither refuses it.
  std::string Refusal() {
    const Result<Reader> reader = Reader::Open(*this, "m");
    if (!reader.ok()) return reader.status().message();
    const Result<VerifyResult> result = reader.value().Verify(1, kQuiet);
    return result.ok() ? result.value().status().message() : result.status().message();
  }

  std::vector<std::string> contents;  // the manifest first

 private:
  std::vector<std::string> names_;
};

// Manifest, heads, padding and data of all files. Of a data byte one bit, or as many as the scale
// says: one hash looks at all of them alike.
TEST_F(ReaderTest, EveryBitFlipIsFound) {
  MemoryFiles files(sample_);
  ASSERT_EQ(files.Refusal(), "");
  const size_t stride = static_cast<size_t>(std::max(1.0, 1 / TestScale()));
  const int data_bits = std::clamp(static_cast<int>(TestScale()), 1, 8);
  size_t found = 0;
  for (size_t f = 0; f < files.contents.size(); ++f) {
    std::string& content = files.contents[f];
    const size_t data_begin = f == 0 ? content.size() : sample_.manifest.files[f - 1].data_begin;
    for (size_t i = 0; i < content.size(); i += stride) {
      const int bits = i < data_begin ? 8 : data_bits;
      for (size_t bit = 0; bit < static_cast<size_t>(bits); ++bit) {
        const char mask = static_cast<char>(1 << (i + bit) % 8);
        content[i] = static_cast<char>(content[i] ^ mask);
        ASSERT_NE(files.Refusal(), "") << "file " << f << ", byte " << i << ", bit " << bit;
        content[i] = static_cast<char>(content[i] ^ mask);
        found += 1;
      }
    }
  }
  EXPECT_GT(found, 100'000 / stride);
  EXPECT_EQ(files.Refusal(), "");
}

TEST_F(ReaderTest, EveryTruncationAndAnyByteTooManyIsFound) {
  MemoryFiles files(sample_);
  const size_t stride = static_cast<size_t>(std::max(1.0, 1 / TestScale()));
  for (std::string& content : files.contents) {
    const std::string good = content;
    for (size_t cut = 1; cut <= good.size(); cut += stride) {
      content.resize(good.size() - cut);
      ASSERT_FALSE(Reader::Open(files, "m").ok()) << "cut to " << content.size();
    }
    content.clear();
    ASSERT_FALSE(Reader::Open(files, "m").ok());
    content = good + '\0';
    ASSERT_FALSE(Reader::Open(files, "m").ok());
    content = good;
  }
  EXPECT_EQ(files.Refusal(), "");
}

TEST_F(ReaderTest, DamageIsNamedByTensorAndBlock) {
  const StoredTensor& tensor = sample_.manifest.params[2].shards[0].tensors[1];
  std::string bytes = sample_.files[1];
  bytes[tensor.offset + 4096 + 17] ^= 1;
  Sample::WriteFile(PathOf(1), bytes);
  const std::string begin = std::to_string(tensor.offset + 4096);
  const std::string end = std::to_string(tensor.offset + 4400);
  EXPECT_EQ(Refusal(),
            "a block is damaged: head.weight.exp_avg of rank 1, block 1 of 2 "
            "(shard-00001-of-00002.safetensors, bytes " +
                begin + " to " + end + ")");
  bytes[tensor.offset] ^= 1;
  bytes[sample_.manifest.files[1].data_begin] ^= 1;
  bytes[sample_.manifest.params[2].shards[0].tensors[2].offset] ^= 1;
  Sample::WriteFile(PathOf(1), bytes);
  const Result<VerifyResult> result = Open().value().Verify(3, kQuiet);
  ASSERT_EQ(result.value().damages.size(), 4u);
  EXPECT_EQ(result.value().damaged_blocks, 4u);
  EXPECT_EQ(result.value().damages[0].param, "embed.weight");
  EXPECT_EQ(result.value().damages[0].kind, OFFLOAD_STATE_MASTER);
  EXPECT_EQ(result.value().damages[2].block, 1u);
  EXPECT_EQ(result.value().damages[2].end, tensor.offset + 4400);
  const std::string text = result.value().status().message();
  EXPECT_EQ(result.value().status().code(), OFFLOAD_CHECKPOINT_CORRUPT);
  EXPECT_EQ(text.find("4 blocks are damaged: embed.weight.master of rank 1, block 0 of 1"), 0u);
  EXPECT_EQ(text.substr(text.size() - 5), "; ...");
}

TEST_F(ReaderTest, MissingFilesAreNamed) {
  fs::remove(PathOf(1));
  ExpectOpenRefused("could not open '" + PathOf(1) + "': No such file or directory",
                    OFFLOAD_IO_FAILED);
  fs::remove(path_ + "/" + kManifestFile);
  ExpectOpenRefused("could not open '" + path_ + "/manifest.json'", OFFLOAD_IO_FAILED);
}

TEST_F(ReaderTest, APipeIsRefusedAndNotWaitedFor) {
  for (const std::string& path : {PathOf(1), path_ + "/manifest.json"}) {
    fs::remove(path);
    ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
    ExpectOpenRefused("expected a regular file", OFFLOAD_IO_FAILED);
  }
}

TEST_F(ReaderTest, FilesOfAnotherCheckpointAreRefused) {
  Sample other;
  other.manifest.step = 43;
  other.Fill();
  Sample::WriteFile(PathOf(0), other.files[0]);
  ExpectOpenRefused("'" + PathOf(0) + "': the header's hash is not the one the manifest tells");
  // The file is refused even if the manifest has its hash and size.
  sample_.manifest.files[0].head_hash = other.manifest.files[0].head_hash;
  Sample::WriteFile(path_ + "/" + kManifestFile, EncodeManifest(sample_.manifest).value());
  ExpectOpenRefused("the header does not describe what the manifest says of this file");
}

TEST_F(ReaderTest, AFileOfAnotherSizeIsRefused) {
  Sample::WriteFile(PathOf(0), sample_.files[0] + "x");
  ExpectOpenRefused("the file has " + std::to_string(sample_.files[0].size() + 1) +
                    " bytes, the manifest says " + std::to_string(sample_.files[0].size()));
}

Result<std::string> Newest(system::Files& files, const std::string& directory) {
  return NewestCheckpoint(files, directory, [](const std::string&) { return Status(); });
}

TEST_F(ReaderTest, TheNewestIsTheGoodOneWithTheHighestStep) {
  system::Files& files = system::SystemFiles();
  EXPECT_EQ(Newest(files, root_.path()).value(), path_);
  Sample later;
  later.manifest.step = 100;
  later.Fill();
  later.Write(root_.path() + "/step-100");
  later.Write(root_.path() + "/.step-200.saving-0123456789abcdef");
  fs::create_directories(root_.path() + "/empty");
  Sample::WriteFile(root_.path() + "/latest", "step-7");
  EXPECT_EQ(Newest(files, root_.path()).value(), root_.path() + "/step-100");
  Sample::WriteFile(root_.path() + "/step-100/manifest.json", later.text.substr(1));
  EXPECT_EQ(Newest(files, root_.path()).value(), path_);
  Sample::WriteFile(PathOf(0), "");
  const Result<std::string> none = Newest(files, root_.path());
  EXPECT_EQ(none.status().code(), OFFLOAD_INVALID_STATE);
  EXPECT_NE(none.status().message().find("holds no good checkpoint; the last one that was refused"),
            std::string::npos)
      << none.status().message();
  EXPECT_EQ(Newest(files, root_.path() + "/empty").status().message(),
            "'" + root_.path() + "/empty' holds no good checkpoint");
  EXPECT_EQ(Newest(files, root_.path() + "/none").status().code(), OFFLOAD_IO_FAILED);
}

// Counts what is read, and how much at once.
class CountingFiles : public system::Files {
 public:
  int64_t Read(int file, void* data, uint64_t bytes, uint64_t offset) override {
    const int64_t read = Files::Read(file, data, bytes, offset);
    total_bytes += static_cast<uint64_t>(std::max<int64_t>(read, 0));
    most_bytes = std::max(most_bytes, bytes);
    return read;
  }
  uint64_t total_bytes = 0;
  uint64_t most_bytes = 0;
};

// The size of a false manifest is not trusted: not even disk space is used for it.
TEST_F(ReaderTest, AManifestThatIsLargeAndNoneCostsLittleMemory) {
  constexpr uint64_t kMiB = uint64_t{1} << 20;
  const std::string path = root_.path() + "/step-100";
  fs::create_directories(path);
  Sample::WriteFile(path + "/manifest.json", "{");
  fs::resize_file(path + "/manifest.json", 1024 * kMiB);
  CountingFiles files;
  EXPECT_EQ(Newest(files, root_.path()).value(), path_);
  EXPECT_LT(files.total_bytes, kMiB);

  // A file that only ends like a manifest is not accepted either.
  const std::string end = sample_.text.substr(sample_.text.size() - kManifestTailBytes);
  Sample::WriteFile(path + "/manifest.json", std::string(4 * kMiB + 17, ' ') + end);
  CountingFiles others;
  const Status status = Reader::Open(others, path).status();
  EXPECT_EQ(status.code(), OFFLOAD_CHECKPOINT_CORRUPT);
  EXPECT_NE(status.message().find("the manifest's own hash does not match its text"),
            std::string::npos)
      << status.message();
  EXPECT_LE(others.most_bytes, kMiB);
  EXPECT_GE(others.total_bytes, 4 * kMiB);
}

}  // namespace
}  // namespace hybridopt::checkpoint
