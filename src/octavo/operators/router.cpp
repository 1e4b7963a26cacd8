// The compiled router: decides in C++ that a call is not for Octavo's kernels and hands it to the kernel that was
// there before, without Python and without its lock. Built on request (octavo operators build), driven by
// octavo/operators/native.py through the C functions at the end.
//
// One Route is one overload at one dispatch key. Its kernel is boxed, so one class serves every overload. What the
// filter cannot refuse goes to the Python router, which is the kernel of an operator of the same schema in a namespace
// of Octavo's; the filter may therefore let too much through, and never refuses what Python would take.

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DispatchKey.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace {

using c10::IValue;
using torch::jit::Stack;

// In the order of native.py's REASONS.
enum Reason : int { DTYPE, COLUMNS, K, DIMENSION, NO_TABLE, NOT_A_WIN, REASONS, PASS };

constexpr int DEVICES = 64;  // tables are kept for so many GPUs and one CPU; others ask Python every time

struct Box {
  int64_t dtype, m_low, m_high, n_low, n_high, k_low, k_high;
};

struct Table {
  bool measured;
  std::vector<Box> boxes;
};

// Positions of arguments; `columns` is a dimension (one integer) or a normalized shape (a list). k < 0: there is none.
struct Filter {
  int64_t tensor, columns, k, dtypes, max_columns, max_k;
};

struct Route {
  std::string name, overload, base;
  c10::DispatchKey key;
  Filter filter;
  c10::OperatorHandle python_operator;
  c10::SafeKernelFunction python;
  std::atomic<bool> enabled{false}, forced{false};
  std::array<std::atomic<const Table*>, DEVICES + 1> tables{};
  std::array<std::atomic<int64_t>, REASONS> refused{};
  // Kernels and tables that were replaced live on: another thread may still be in them.
  std::atomic<const c10::SafeKernelFunction*> original{nullptr};
  std::vector<std::unique_ptr<const c10::SafeKernelFunction>> originals;
  std::vector<std::unique_ptr<const Table>> kept_tables;
  std::unique_ptr<torch::Library> library;
  std::mutex mutex;

  Reason decide(const c10::OperatorHandle& op, const Stack& stack) const;
  void call_original(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack);
  void install();
};

// Set by Python, while it is asked about a call, if it refuses that too.
thread_local bool python_refused = false;

struct Router final : c10::OperatorKernel {
  explicit Router(Route* route) : route(route) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    Route* const to = route;  // this object may be destroyed while the call runs, the route never is
    if (to->enabled.load(std::memory_order_relaxed)) {
      const Reason reason = to->decide(op, *stack);
      if (reason == PASS) {
        Stack arguments(*stack);  // Python consumes what it is asked about
        python_refused = false;
        to->python.callBoxed(to->python_operator, keys, stack);
        if (!python_refused) return;
        python_refused = false;
        *stack = std::move(arguments);
      } else {
        to->refused[reason].fetch_add(1, std::memory_order_relaxed);
      }
    }
    to->call_original(op, keys, stack);
  }

  Route* route;
};

bool within(int64_t value, int64_t low, int64_t high) { return low <= value && value <= high; }

Reason Route::decide(const c10::OperatorHandle& op, const Stack& stack) const {
  const size_t count = op.schema().arguments().size();
  const IValue& tensor = torch::jit::peek(stack, filter.tensor, count);
  if (!tensor.isTensor()) return PASS;
  const at::Tensor& x = tensor.toTensor();
  if (!x.defined()) return PASS;
  const auto dtype = static_cast<int64_t>(x.scalar_type());
  if (dtype >= 63 || !((filter.dtypes >> dtype) & 1)) return DTYPE;
  if (x.layout() != at::kStrided || x.numel() == 0) return PASS;

  int64_t n = 1;
  bool last = true;
  const IValue& columns = torch::jit::peek(stack, filter.columns, count);
  if (columns.isInt()) {
    const int64_t dims = x.dim(), dim = columns.toInt();
    if (!within(dim, -dims, dims - 1)) return PASS;
    n = x.size(dim);
    last = (dim == -1 || dim == dims - 1) && x.stride(-1) == 1;
  } else if (columns.isIntList()) {
    const auto shape = columns.toIntVector();
    if (shape.empty() || shape.size() > static_cast<size_t>(x.dim())) return PASS;
    for (size_t i = 0; i < shape.size(); i++) {
      if (x.size(x.dim() - shape.size() + i) != shape[i]) return PASS;
      n *= shape[i];
    }
  } else {
    return PASS;
  }
  int64_t k = 1;
  if (filter.k >= 0) {
    const IValue& wanted = torch::jit::peek(stack, filter.k, count);
    if (!wanted.isInt()) return PASS;
    k = wanted.toInt();
    if (!within(k, 1, n)) return PASS;
    if (k > filter.max_k) return K;
  }
  if (n > filter.max_columns) return COLUMNS;
  if (forced.load(std::memory_order_relaxed)) return PASS;

  const int64_t device = x.device().is_cpu() ? DEVICES : x.device().index();
  if (!within(device, 0, DEVICES)) return PASS;
  const Table* table = tables[device].load(std::memory_order_acquire);
  if (table == nullptr) return PASS;  // Python sets it as it answers
  if (!table->measured) return NO_TABLE;
  if (!last) return DIMENSION;
  const int64_t m = x.numel() / n;
  for (const Box& box : table->boxes) {
    if (box.dtype == dtype && within(m, box.m_low, box.m_high) && within(n, box.n_low, box.n_high) &&
        within(k, box.k_low, box.k_high))
      return PASS;
  }
  return NOT_A_WIN;
}

void Route::call_original(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const c10::SafeKernelFunction* kernel = original.load(std::memory_order_acquire);
  TORCH_CHECK_NOT_IMPLEMENTED(kernel != nullptr, "PyTorch has no ", c10::toString(key), " kernel of aten::", name);
  try {
    kernel->callBoxed(op, keys, stack);
    return;
  } catch (const c10::Error& error) {
    // The kernel belonged to an override that was taken away; what is below it is PyTorch's. Nothing was consumed.
    if (std::string_view(error.what_without_backtrace()).find("SafeKernelFunction has been invalidated") ==
        std::string_view::npos)
      throw;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (original.load(std::memory_order_acquire) == kernel) install();
  }
  kernel = original.load(std::memory_order_acquire);
  TORCH_CHECK_NOT_IMPLEMENTED(kernel != nullptr, "PyTorch has no ", c10::toString(key), " kernel of aten::", name);
  kernel->callBoxed(op, keys, stack);
}

// PyTorch warns that a kernel is overridden, which is what is meant to happen here.
struct Quiet final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

void Route::install() {
  library.reset();
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(("aten::" + base).c_str(), overload.c_str());
  if (op.hasComputedKernelForDispatchKey(key)) {
    originals.push_back(
        std::make_unique<const c10::SafeKernelFunction>(op.getComputedKernelForDispatchKey(key)));
    original.store(originals.back().get(), std::memory_order_release);
  } else {
    original.store(nullptr, std::memory_order_release);
  }
  Quiet quiet;
  c10::WarningHandler* const before = c10::WarningUtils::get_warning_handler();
  c10::WarningUtils::set_warning_handler(&quiet);
  try {
    library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
    library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Router>(this)));
  } catch (...) {
    c10::WarningUtils::set_warning_handler(before);
    throw;
  }
  c10::WarningUtils::set_warning_handler(before);
}

thread_local std::string last_error;

}  // namespace

extern "C" {

const char* octavo_error() { return last_error.c_str(); }

// Registers a router of aten::<base>[.<overload>] at the dispatch key; what it takes goes to octavo_router::<...>.
// Returns the route, which lives as long as the process, or null (see octavo_error).
Route* octavo_route(const char* base, const char* overload, const char* key, const Filter* filter) {
  try {
    const auto dispatch_key = c10::parseDispatchKey(key);
    const auto python = c10::Dispatcher::singleton().findSchemaOrThrow(
        (std::string("octavo_router::") + base).c_str(), overload);
    const std::string dot = *overload ? std::string(".") + overload : "";
    auto* route = new Route{base + dot, overload, base, dispatch_key, *filter, python,
                            python.getComputedKernelForDispatchKey(dispatch_key)};
    route->install();
    return route;
  } catch (const std::exception& error) {
    last_error = error.what();
    return nullptr;
  }
}

void octavo_switch(Route* route, int enabled, int forced) {
  route->forced.store(forced != 0);
  route->enabled.store(enabled != 0);
}

// The wins of a device (-1: the CPU): `count` boxes, or none measured if `measured` is 0. Null boxes: ask Python.
void octavo_table(Route* route, int device, int measured, const Box* boxes, int64_t count) {
  if (!within(device, -1, DEVICES - 1)) return;
  const std::lock_guard<std::mutex> lock(route->mutex);
  const Table* table = nullptr;
  if (boxes != nullptr) {
    route->kept_tables.push_back(
        std::make_unique<const Table>(Table{measured != 0, std::vector<Box>(boxes, boxes + count)}));
    table = route->kept_tables.back().get();
  }
  route->tables[device < 0 ? DEVICES : device].store(table, std::memory_order_release);
}

// Called in the Python router: what it returns is to be dropped, and the original kernel called.
void octavo_refuse() { python_refused = true; }

int64_t octavo_refused(const Route* route, int reason) { return route->refused[reason].load(); }

void octavo_reset(Route* route) {
  for (auto& count : route->refused) count.store(0);
}
}
