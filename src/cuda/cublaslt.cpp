// The dozen functions of cuBLASLt that a linear layer takes, by their C ABI (stable since CUDA 11).
#include "cuda/cublaslt.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <string>

#include "core/error.h"
#include "cuda/errors.h"
#include "cuda/memory.h"

namespace scope::cuda {

namespace {

constexpr size_t kWorkspaceBytes = size_t{32} << 20;

// Enumerators of cublasLt.h and library_types.h.
constexpr int kCompute32F = 68, kReal32F = 0, kRealBf16 = 14, kReal8E4m3 = 28;
constexpr int kTransposeA = 3, kTransposeB = 4, kEpilogue = 7, kBiasPointer = 8, kBiasType = 26;
constexpr int kScalePointerA = 17, kScalePointerB = 18, kFastSums = 25, kScaleModeA = 31, kScaleModeB = 32;
constexpr int kScaleOfRows = 3;
constexpr int kEpilogueNone = 1, kEpilogueBias = 4, kEpilogueGelu = 32;
constexpr int kMaxWorkspace = 1, kReductionSchemes = 3, kAlignmentA = 5;  // then B, C and D

int type_of(DType dtype) { return dtype == DType::f32 ? kReal32F : kRealBf16; }

void check(int status, const char* what) {
  require(status == 0, status == 3 ? Status::out_of_memory : Status::device, "cuBLASLt: {} gave status {}", what, status);
}

}  // namespace

struct CublasLt::Algorithm {
  uint64_t data[8];
};

struct CublasLt::Functions {
  struct Heuristic {
    Algorithm algorithm;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
  };
  void* library = nullptr;
  int (*create)(void**) = nullptr;
  int (*destroy)(void*) = nullptr;
  int (*desc_create)(void**, int, int) = nullptr;
  int (*desc_destroy)(void*) = nullptr;
  int (*desc_set)(void*, int, const void*, size_t) = nullptr;
  int (*layout_create)(void**, int, uint64_t, uint64_t, int64_t) = nullptr;
  int (*layout_destroy)(void*) = nullptr;
  int (*preference_create)(void**) = nullptr;
  int (*preference_destroy)(void*) = nullptr;
  int (*preference_set)(void*, int, const void*, size_t) = nullptr;
  int (*heuristic)(void*, void*, void*, void*, void*, void*, void*, int, Heuristic*, int*) = nullptr;
  int (*matmul)(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*, void*,
                void*, const Algorithm*, void*, size_t, void*) = nullptr;

  template <class T>
  void find(T*& function, const char* name) const {
    function = reinterpret_cast<T*>(::dlsym(library, name));
    require(function != nullptr, Status::unsupported, "cuBLASLt: the library has no {}", name);
  }

  Functions() {
    std::string tried;
    for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"}) {
      library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
      if (library != nullptr) break;
      tried += fmt::format("{}{}", tried.empty() ? "" : ", ", name);
    }
    require(
        library != nullptr, Status::unsupported,
        "linear layers on a GPU need cuBLASLt, and none of {} could be loaded: install CUDA's libcublas, or add its folder "
        "to LD_LIBRARY_PATH",
        tried);
    find(create, "cublasLtCreate");
    find(destroy, "cublasLtDestroy");
    find(desc_create, "cublasLtMatmulDescCreate");
    find(desc_destroy, "cublasLtMatmulDescDestroy");
    find(desc_set, "cublasLtMatmulDescSetAttribute");
    find(layout_create, "cublasLtMatrixLayoutCreate");
    find(layout_destroy, "cublasLtMatrixLayoutDestroy");
    find(preference_create, "cublasLtMatmulPreferenceCreate");
    find(preference_destroy, "cublasLtMatmulPreferenceDestroy");
    find(preference_set, "cublasLtMatmulPreferenceSetAttribute");
    find(heuristic, "cublasLtMatmulAlgoGetHeuristic");
    find(matmul, "cublasLtMatmul");
  }
  // The library stays loaded: unloading one that has registered kernels is not safe.
};

// What describes products of one shape.
struct CublasLt::Plan {
  const Functions& call;
  void *desc = nullptr, *weights = nullptr, *x = nullptr, *out = nullptr, *preference = nullptr;
  Algorithm algorithm{};

  explicit Plan(const Functions& functions) : call(functions) {}
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() {
    if (preference != nullptr) call.preference_destroy(preference);
    for (void* layout : {weights, x, out}) {
      if (layout != nullptr) call.layout_destroy(layout);
    }
    if (desc != nullptr) call.desc_destroy(desc);
  }

  template <class T>
  void set(int attribute, const T& value) const {
    check(call.desc_set(desc, attribute, &value, sizeof value), "cublasLtMatmulDescSetAttribute");
  }
  void set_pointers(const ProductArrays& at) const {
    if (at.bias != nullptr) set(kBiasPointer, at.bias);
    if (at.x_scales == nullptr) return;
    set(kScalePointerA, at.weight_scales);
    set(kScalePointerB, at.x_scales);
  }
  // Older libraries do not know a scale for each row.
  bool scale_rows(bool fast) const {
    for (const int attribute : {kScaleModeA, kScaleModeB}) {
      if (call.desc_set(desc, attribute, &kScaleOfRows, sizeof kScaleOfRows) != 0) return false;
    }
    set(kFastSums, static_cast<int8_t>(fast));
    return true;
  }
};

CublasLt::CublasLt() : call_(std::make_unique<Functions>()) {
  check(call_->create(&handle_), "cublasLtCreate");
  workspace_ = allocate(static_cast<int64_t>(kWorkspaceBytes));
}

CublasLt::~CublasLt() {
  plans_.clear();
  release(workspace_);
  call_->destroy(handle_);
}

// The library is column-major: out^T [columns, rows] = weights [columns, depth] . x^T, with the weights read transposed.
const CublasLt::Plan* CublasLt::plan(const Product& product, const ProductArrays& at) {
  const auto found = plans_.find(product);
  if (found != plans_.end()) return found->second.get();
  auto made = std::make_unique<Plan>(*call_);
  check(call_->desc_create(&made->desc, kCompute32F, kReal32F), "cublasLtMatmulDescCreate");
  const bool bytes = product.operands != Operands::bf16;
  if (bytes && !made->scale_rows(product.operands == Operands::e4m3_fast)) return (plans_[product] = nullptr).get();
  made->set(kTransposeA, int32_t{1});
  made->set(kTransposeB, int32_t{0});
  const uint32_t epilogue = (product.bias ? kEpilogueBias : 0u) | (product.gelu ? kEpilogueGelu : 0u);
  made->set(kEpilogue, epilogue == 0 ? uint32_t{kEpilogueNone} : epilogue);
  if (product.bias) made->set(kBiasType, int32_t{bytes ? kRealBf16 : type_of(product.out_type)});
  made->set_pointers(at);  // without them the library would propose for one scale
  const auto layout = [&](void*& to, int type, int64_t height, int64_t width) {
    check(call_->layout_create(&to, type, static_cast<uint64_t>(height), static_cast<uint64_t>(width), height),
          "cublasLtMatrixLayoutCreate");
  };
  layout(made->weights, bytes ? kReal8E4m3 : kRealBf16, product.depth, product.columns);
  layout(made->x, bytes ? kReal8E4m3 : kRealBf16, product.depth, product.rows);
  layout(made->out, type_of(product.out_type), product.columns, product.rows);
  check(call_->preference_create(&made->preference), "cublasLtMatmulPreferenceCreate");
  const auto prefer = [&](int attribute, const auto& value) {
    check(call_->preference_set(made->preference, attribute, &value, sizeof value), "cublasLtMatmulPreferenceSetAttribute");
  };
  prefer(kMaxWorkspace, uint64_t{kWorkspaceBytes});
  prefer(kReductionSchemes, uint32_t{2});  // partial sums in f32, added in a fixed order: never in place
  for (int i = 0; i < 4; ++i) prefer(kAlignmentA + i, uint32_t{16});
  const std::vector<Algorithm> proposed = propose(*made, 1);
  if (proposed.empty()) {
    made = nullptr;
  } else {
    made->algorithm = proposed[0];
  }
  return (plans_[product] = std::move(made)).get();
}

const CublasLt::Plan& CublasLt::need_plan(const Product& product, const ProductArrays& at) {
  const Plan* found = plan(product, at);
  require(
      found != nullptr, Status::unsupported, "cuBLASLt: no algorithm for {} x {} x {}{}", product.rows, product.columns,
      product.depth,
      product.operands == Operands::bf16
          ? ""
          : " in fp8 with a scale for each row and column: it has them from CUDA 12.9 on, and not on every GPU with fp8");
  return *found;
}

std::vector<CublasLt::Algorithm> CublasLt::propose(const Plan& p, int most) const {
  std::vector<Functions::Heuristic> found(static_cast<size_t>(most));
  int count = 0;
  const int status =
      call_->heuristic(handle_, p.desc, p.weights, p.x, p.out, p.out, p.preference, most, found.data(), &count);
  std::vector<Algorithm> algorithms;
  for (int i = 0; status == 0 && i < count; ++i) {
    const auto& heuristic = found[static_cast<size_t>(i)];
    if (heuristic.state == 0) algorithms.push_back(heuristic.algorithm);
  }
  return algorithms;
}

void CublasLt::run(void* stream, const Plan& p, const Algorithm& algorithm, const ProductArrays& at) const {
  p.set_pointers(at);
  const float one = 1, zero = 0;
  check(call_->matmul(handle_, p.desc, &one, at.weights, p.weights, at.x, p.x, &zero, at.out, p.out, at.out, p.out,
                      &algorithm, workspace_, kWorkspaceBytes, stream),
        "cublasLtMatmul");
}

void CublasLt::multiply(void* stream, const Product& product, const ProductArrays& at) {
  const Plan& p = need_plan(product, at);
  run(stream, p, p.algorithm, at);
}

std::vector<double> CublasLt::time_algorithms(void* stream, const Product& product, const ProductArrays& at) {
  constexpr int kMostProposals = 8;
  constexpr double kEnough = 0.03;  // seconds of repeated calls
  constexpr int kFewest = 3, kMost = 50;
  const Plan& p = need_plan(product, at);
  std::vector<Algorithm> algorithms = propose(p, kMostProposals);
  algorithms.insert(algorithms.begin(), p.algorithm);
  const auto on = static_cast<cudaStream_t>(stream);
  cudaEvent_t start = nullptr, end = nullptr;
  check(cudaEventCreate(&start), "cudaEventCreate");
  const std::unique_ptr<CUevent_st, decltype(&cudaEventDestroy)> start_owner(start, cudaEventDestroy);
  check(cudaEventCreate(&end), "cudaEventCreate");
  const std::unique_ptr<CUevent_st, decltype(&cudaEventDestroy)> end_owner(end, cudaEventDestroy);
  const auto seconds_of = [&](const Algorithm& algorithm, int calls) {
    check(cudaEventRecord(start, on), "cudaEventRecord");
    for (int i = 0; i < calls; ++i) run(stream, p, algorithm, at);
    check(cudaEventRecord(end, on), "cudaEventRecord");
    check(cudaEventSynchronize(end), "the device");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, start, end), "cudaEventElapsedTime");
    return static_cast<double>(milliseconds) / 1e3 / calls;
  };
  std::vector<double> seconds;
  for (const Algorithm& algorithm : algorithms) {
    seconds_of(algorithm, 1);  // kernels load with their first use
    const double once = seconds_of(algorithm, 1);
    seconds.push_back(seconds_of(algorithm, static_cast<int>(std::clamp(kEnough / once, double{kFewest}, double{kMost}))));
  }
  return seconds;
}

}  // namespace scope::cuda
