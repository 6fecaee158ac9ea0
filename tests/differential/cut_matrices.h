// Matrices that ranks have parts of, trained by Muon: by one rank that has the whole ones, and by
// ranks that bring the parts together with an exchange. The params must have the same bits.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "rig.h"
#include "sharded.h"

namespace hybridopt {

struct CutTensor {
  std::string name;
  std::vector<int64_t> shape;
  int32_t dtype;
  int32_t grad_dtype;
  std::vector<Piece> pieces;  // by rank

  uint64_t count() const { return ElementsOf(shape); }
};

struct CutProblem {
  std::vector<CutTensor> tensors;
  uint64_t seed = 0;
  size_t skipped = SIZE_MAX;  // a step in which a gradient has an Inf

  Bytes Params(size_t tensor) const {
    return Array(tensor, tensors[tensor].dtype, 1'000'000 + tensor);
  }
  Bytes Grads(size_t tensor, size_t step) const {
    const CutTensor& of = tensors[tensor];
    Bytes grads = Array(tensor, of.grad_dtype, 1000 * step + tensor);
    if (step == skipped && tensor == 0)
      PutElement(grads, of.grad_dtype, of.count() - 1,
                 BitsOf(of.grad_dtype, std::numeric_limits<float>::infinity()));
    return grads;
  }
  // The elements of a rank, of an array of the whole tensor.
  Bytes PartOf(const Bytes& whole, size_t tensor, int32_t rank, int32_t dtype) const {
    const Piece& piece = tensors[tensor].pieces[static_cast<size_t>(rank)];
    return Select(whole, GlobalIndices(piece), DtypeBytes(dtype));
  }

 private:
  Bytes Array(size_t tensor, int32_t dtype, uint64_t stream) const {
    Random random(seed * 10'000'000 + stream);
    return RandomArray(dtype, tensors[tensor].count(), false, random);
  }
};

class DeviceArray {
 public:
  DeviceArray() = default;
  DeviceArray(offload_context_t context, uint64_t bytes) : context_(context), bytes_(bytes) {
    if (bytes > 0) MUST(offload_device_alloc(context, bytes, &data_));
  }
  ~DeviceArray() {
    if (data_ != nullptr) MUST(offload_device_free(context_, data_));
  }
  DeviceArray(DeviceArray&& other) noexcept { *this = std::move(other); }
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(context_, other.context_);
    std::swap(bytes_, other.bytes_);
    std::swap(data_, other.data_);
    return *this;
  }

  void* data() const { return data_; }
  void Upload(const Bytes& from) const {
    if (bytes_ > 0) MUST(offload_device_upload(context_, data_, from.data(), bytes_, nullptr));
  }
  Bytes Download() const {
    Bytes to(bytes_);
    if (bytes_ > 0) MUST(offload_device_download(context_, to.data(), data_, bytes_, nullptr));
    return to;
  }

 private:
  offload_context_t context_ = nullptr;
  uint64_t bytes_ = 0;
  void* data_ = nullptr;
};

// Whole matrices and their optimizer.
class WholeMatrices {
 public:
  WholeMatrices(offload_context_t context, const offload_comm_t* comm, uint64_t comm_timeout_ns)
      : context_(context) {
    auto options = Make<offload_optimizer_options_t>();
    options.algorithm = OFFLOAD_MUON;
    options.chunk_elements = 1024;
    options.comm = comm;
    options.comm_timeout_ns = comm_timeout_ns;
    MUST(offload_optimizer_create(context, &options, &optimizer_));
    auto group = Make<offload_group_t>();
    group.lr = 0.02;
    group.weight_decay = 0.1;
    group.momentum = 0.95;
    group.nesterov = 1;
    group.eps = 1e-7;
    uint32_t group_id = 0;
    MUST(offload_optimizer_add_group(optimizer_, &group, &group_id));
    group = Make<offload_group_t>();
    group.algorithm = OFFLOAD_SGD;
    group.lr = 0.1;
    MUST(offload_optimizer_add_group(optimizer_, &group, &group_id));
  }
  ~WholeMatrices() { MUST(offload_optimizer_destroy(optimizer_)); }
  WholeMatrices(const WholeMatrices&) = delete;
  WholeMatrices& operator=(const WholeMatrices&) = delete;

  // Registers a matrix. Its param and gradient are to be set before Commit and Step.
  void Add(const CutTensor& tensor) {
    params_.emplace_back(context_, tensor.count() * DtypeBytes(tensor.dtype));
    grads_.emplace_back(context_, tensor.count() * DtypeBytes(tensor.grad_dtype));
    Piece whole;
    whole.shape = whole.extents = tensor.shape;
    whole.offsets.resize(tensor.shape.size());
    whole.box_count = 1;
    const offload_shard_t shard = whole.Abi();
    auto param = Make<offload_param_t>();
    param.dtype = tensor.dtype;
    param.grad_dtype = tensor.grad_dtype;
    param.name = tensor.name.c_str();
    param.data = params_.back().data();
    param.grad = grads_.back().data();
    param.count = tensor.count();
    param.shard = &shard;
    MUST(offload_optimizer_add_params(optimizer_, &param, 1, nullptr));
  }
  // An optimizer without a matrix has a param without elements.
  void Commit() {
    auto nothing = Make<offload_param_t>();
    nothing.group = 1;
    nothing.dtype = nothing.grad_dtype = OFFLOAD_FP32;
    nothing.name = "nothing";
    if (params_.empty()) MUST(offload_optimizer_add_params(optimizer_, &nothing, 1, nullptr));
    MUST(offload_optimizer_commit(optimizer_, nullptr));
  }
  void Step() {
    offload_ticket_t ticket = 0;
    MUST(offload_optimizer_step(optimizer_, nullptr, &ticket));
    MUST(offload_optimizer_wait(optimizer_, ticket, -1));
  }

  void Save(const std::string& path) {
    auto options = Make<offload_save_options_t>();
    options.path = path.c_str();
    offload_ticket_t ticket = 0;
    MUST(offload_optimizer_save(optimizer_, &options, &ticket));
    MUST(offload_optimizer_wait(optimizer_, ticket, -1));
  }
  void Load(const std::string& path) {
    auto options = Make<offload_load_options_t>();
    options.path = path.c_str();
    offload_ticket_t ticket = 0;
    MUST(offload_optimizer_load(optimizer_, &options, &ticket));
    MUST(offload_optimizer_wait(optimizer_, ticket, -1));
  }

  const DeviceArray& param(size_t index) const { return params_[index]; }
  const DeviceArray& grad(size_t index) const { return grads_[index]; }

 private:
  const offload_context_t context_;
  offload_optimizer_t optimizer_ = nullptr;
  std::vector<DeviceArray> params_, grads_;
};

// The params of all tensors before the first step, and after each.
inline std::vector<std::vector<Bytes>> TrainWhole(const CutProblem& problem, size_t steps,
                                                  const ContextSetting& setting) {
  const TestContext context(setting);
  WholeMatrices matrices(context.handle(), nullptr, 0);
  for (size_t t = 0; t < problem.tensors.size(); ++t) {
    matrices.Add(problem.tensors[t]);
    matrices.param(t).Upload(problem.Params(t));
  }
  matrices.Commit();
  std::vector<std::vector<Bytes>> params;
  for (size_t step = 0; step <= steps; ++step) {
    std::vector<Bytes>& now = params.emplace_back();
    for (size_t t = 0; t < problem.tensors.size(); ++t) now.push_back(matrices.param(t).Download());
    if (step == steps) break;
    for (size_t t = 0; t < problem.tensors.size(); ++t)
      matrices.grad(t).Upload(problem.Grads(t, step));
    matrices.Step();
  }
  return params;
}

// One rank that has parts.
class CutRank {
 public:
  // Waits for no other rank.
  CutRank(const CutProblem& problem, int32_t rank, const ContextSetting& setting)
      : problem_(problem), rank_(rank), setting_(setting), context_(setting) {
    if (setting.device_kind != OFFLOAD_DEVICE_HOST)
      MUST(offload_stream_create(context_.handle(), &stream_));
    for (const CutTensor& tensor : problem.tensors) {
      const uint64_t count = tensor.pieces[static_cast<size_t>(rank)].count;
      params_.emplace_back(context_.handle(), count * DtypeBytes(tensor.dtype));
      grads_.emplace_back(context_.handle(), count * DtypeBytes(tensor.grad_dtype));
      shards_.push_back(tensor.pieces[static_cast<size_t>(rank)].Abi());
    }
    for (size_t t = 0; t < problem.tensors.size(); ++t) {
      const CutTensor& tensor = problem.tensors[t];
      auto matrix = Make<offload_exchange_matrix_t>();
      matrix.dtype = tensor.dtype;
      matrix.grad_dtype = tensor.grad_dtype;
      matrix.name = tensor.name.c_str();
      matrix.shard = &shards_[t];
      inputs_.push_back(matrix);
    }
  }
  ~CutRank() {
    matrices_.reset();
    if (exchange_ != nullptr) MUST(offload_exchange_destroy(exchange_));
    params_.clear();
    grads_.clear();
    MUST(offload_stream_destroy(context_.handle(), stream_));
  }
  CutRank(const CutRank&) = delete;
  CutRank& operator=(const CutRank&) = delete;

  // Two tables, for an exchange and for an optimizer.
  void Open(const offload_comm_t& exchanges, const offload_comm_t& steps) {
    const offload_exchange_options_t options = Options(exchanges);
    MUST(offload_exchange_create(context_.handle(), &options, &exchange_));
    matrices_ = std::make_unique<WholeMatrices>(context_.handle(), &steps, kTimeoutNs);
    for (size_t t = 0; t < problem_.tensors.size(); ++t) {
      whole_.push_back(homes_);
      if (Home(t) != rank_) continue;
      matrices_->Add(problem_.tensors[t]);
      homes_ += 1;
    }
    for (size_t t = 0; t < problem_.tensors.size(); ++t) {
      const int32_t dtype = problem_.tensors[t].dtype;
      Fill(params_[t], problem_.PartOf(problem_.Params(t), t, rank_, dtype));
      MUST(offload_exchange_gather(exchange_, Id(t), dtype, params_[t].data(), WholeParam(t),
                                   stream_));
    }
    matrices_->Commit();
  }

  void Step(size_t step) {
    for (size_t t = 0; t < problem_.tensors.size(); ++t) {
      const int32_t dtype = problem_.tensors[t].grad_dtype;
      Fill(grads_[t], problem_.PartOf(problem_.Grads(t, step), t, rank_, dtype));
      MUST(offload_exchange_gather(exchange_, Id(t), dtype, grads_[t].data(), WholeGrad(t),
                                   stream_));
    }
    matrices_->Step();
    for (size_t t = 0; t < problem_.tensors.size(); ++t)
      MUST(offload_exchange_scatter(exchange_, Id(t), problem_.tensors[t].dtype, WholeParam(t),
                                    params_[t].data(), stream_));
  }

  void Save(const std::string& path) { matrices_->Save(path); }

  // Empty if every part has the bits of these params.
  std::string Difference(const std::vector<Bytes>& expected) const {
    for (size_t t = 0; t < problem_.tensors.size(); ++t) {
      const CutTensor& tensor = problem_.tensors[t];
      if (params_[t].Download() != problem_.PartOf(expected[t], t, rank_, tensor.dtype))
        return "rank " + std::to_string(rank_) + " has other bits of " + tensor.name;
    }
    return "";
  }

  offload_exchange_options_t Options(const offload_comm_t& comm) const {
    auto options = Make<offload_exchange_options_t>();
    options.matrix_count = static_cast<uint32_t>(inputs_.size());
    options.matrices = inputs_.data();
    options.comm = &comm;
    options.comm_timeout_ns = kTimeoutNs;
    return options;
  }
  int32_t Home(size_t tensor) const {
    int32_t home = -1;
    MUST(offload_exchange_home(exchange_, Id(tensor), &home));
    return home;
  }
  offload_context_t context() const { return context_.handle(); }
  size_t homes() const { return homes_; }

 private:
  static constexpr uint64_t kTimeoutNs = 20'000'000'000;

  static uint32_t Id(size_t tensor) { return static_cast<uint32_t>(tensor); }
  void* WholeParam(size_t t) const {
    return Home(t) == rank_ ? matrices_->param(whole_[t]).data() : nullptr;
  }
  void* WholeGrad(size_t t) const {
    return Home(t) == rank_ ? matrices_->grad(whole_[t]).data() : nullptr;
  }

  // On the simulated device a command of the stream writes the part, some time after this call.
  struct LateFill {
    Bytes from;
    void* to;
  };
  void Fill(const DeviceArray& array, const Bytes& bytes) {
    if (bytes.empty()) return;
    if (setting_.device_kind != OFFLOAD_DEVICE_SIM) return array.Upload(bytes);
    auto late = std::make_unique<LateFill>(LateFill{bytes, nullptr});
    MUST(offload_device_map(context_.handle(), array.data(), bytes.size(), &late->to));
    const auto run = [](void* user) {
      const std::unique_ptr<LateFill> owned(static_cast<LateFill*>(user));
      std::memcpy(owned->to, owned->from.data(), owned->from.size());
    };
    MUST(offload_stream_run(context_.handle(), stream_, run, late.release()));
  }

  const CutProblem& problem_;
  const int32_t rank_;
  const ContextSetting setting_;
  const TestContext context_;
  offload_stream_t stream_ = nullptr;
  std::vector<DeviceArray> params_, grads_;  // parts
  std::vector<offload_shard_t> shards_;
  std::vector<offload_exchange_matrix_t> inputs_;
  offload_exchange_t exchange_ = nullptr;
  std::unique_ptr<WholeMatrices> matrices_;
  std::vector<size_t> whole_;  // by tensor: which of matrices_
  size_t homes_ = 0;
};

}  // namespace hybridopt
