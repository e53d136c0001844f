// A simulated CUDA device for torch's CUDA build: tensors have device type CUDA, and their memory is host memory.
//
// One boxed kernel replaces every CUDA kernel of aten and c10d. It refuses what CUDA refuses (several devices, products
// of integers), calls the CPU's kernel on views of the same memory, and gives the results back as CUDA tensors. With a
// limit, operations on larger tensors are not computed: meta kernels give the shapes, and results are only allocated.
// Operations that the CPU lacks follow at the end. Every wait of the host for the device is announced to Python.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/record_function.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <torch/csrc/Storage.h>
#include <torch/library.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace {

using c10::IValue;
using std::string;

constexpr int kDevices = 8;
constexpr int64_t kRounding = 512;     // bytes, as of CUDA's allocator
constexpr int64_t kMapped = 1 << 20;   // larger blocks are mapped, so that untouched memory costs nothing
const c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);
const c10::DispatchKeySet kAbove =
    c10::autograd_dispatch_keyset | c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView);
constexpr double kNotComputed = 1e-3;  // in small results of operations that were not computed
const string kOneDevice = "Expected all tensors to be on the same device, but found at least two devices, cuda:";

thread_local int8_t current_device = 0;
thread_local c10::StreamId current_stream[kDevices];
std::atomic<c10::StreamId> streams{0};
int64_t limit = INT64_MAX;  // elements
int64_t capacity = int64_t(79) << 30;
std::mutex lock;
std::function<void(string)>* on_wait = nullptr;

void waits(const string& what) {
  RECORD_FUNCTION(what == "device" ? "cudaDeviceSynchronize" : "cudaStreamSynchronize", std::vector<IValue>{});
  (*on_wait)(what);  // takes Python's lock
}

// ---- memory ---------------------------------------------------------------------------------------------------------

struct Memory {
  int64_t live = 0, peak = 0, blocks = 0;
} memory[kDevices];
struct Block {
  int64_t bytes;
  int device;
  int file = -1;  // of a block that other processes may map
};
std::unordered_map<void*, Block> blocks;
std::unordered_set<const void*> pinned;

void release(void* pointer) {
  std::lock_guard<std::mutex> guard(lock);
  auto block = blocks.find(pointer);
  if (block == blocks.end()) return;
  auto [bytes, device, file] = block->second;
  blocks.erase(block);
  memory[device].live -= bytes;
  if (bytes >= kMapped) munmap(pointer, bytes);
  else free(pointer);
  if (file >= 0) close(file);
}

void replace_pages(void* pointer, int64_t bytes, int file) {
  TORCH_CHECK(mmap(pointer, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == pointer, "mmap failed");
}

bool write_all(int file, const char* data, int64_t bytes) {
  for (int64_t done = 0, count; done < bytes; done += count)
    if ((count = write(file, data + done, bytes - done)) <= 0) return false;
  return true;
}

int shared(uint64_t pointer) {  // a file with a block's memory, instead of a handle of CUDA IPC
  std::lock_guard<std::mutex> guard(lock);
  auto block = blocks.find(reinterpret_cast<void*>(pointer));
  TORCH_CHECK(block != blocks.end() && block->second.bytes >= kMapped, "only blocks of 1 MiB and more are shared");
  auto& [bytes, device, file] = block->second;
  if (file >= 0) return file;
  file = memfd_create("sim_cuda", MFD_CLOEXEC);
  TORCH_CHECK(file >= 0 && write_all(file, static_cast<char*>(block->first), bytes), "no shared memory");
  replace_pages(block->first, bytes, file);
  return file;
}

void open_shared(uint64_t pointer, const string& path) {  // the block at `pointer` becomes that of another process
  std::lock_guard<std::mutex> guard(lock);
  auto block = blocks.find(reinterpret_cast<void*>(pointer));
  int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  TORCH_CHECK(block != blocks.end() && file >= 0, "cannot open ", path);
  replace_pages(block->first, block->second.bytes, file);
  close(file);
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    c10::Device place(c10::kCUDA, current_device);
    if (size == 0) return {nullptr, nullptr, &release, place};
    int64_t bytes = (int64_t(size) + kRounding - 1) / kRounding * kRounding;
    std::lock_guard<std::mutex> guard(lock);
    Memory& own = memory[current_device];
    TORCH_CHECK_WITH(OutOfMemoryError, own.live + bytes <= capacity, "CUDA out of memory. Tried to allocate ", bytes,
                     " bytes; ", own.live, " of ", capacity, " are allocated");
    void* pointer = bytes < kMapped ? aligned_alloc(kRounding, bytes)
                                    : mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(pointer && pointer != MAP_FAILED, "the host has no memory for the simulated device");
    // NaN: whoever reads it before it is written is seen. Below a limit, what is not computed reads as zeros.
    if (limit == INT64_MAX) std::memset(pointer, 0xFF, bytes);
    else if (bytes < kMapped) std::memset(pointer, 0, bytes);
    own.live += bytes;
    own.peak = std::max(own.peak, own.live);
    own.blocks++;
    blocks[pointer] = {bytes, current_device};
    return {pointer, pointer, &release, place};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} device_memory;

void resize_storage(pybind11::handle storage, int64_t bytes) {  // as `UntypedStorage.resize_`, which asks CUDA
  c10::StorageImpl* own = THPStorage_Unpack(storage.ptr()).unsafeGetStorageImpl();
  c10::DeviceGuard guard(own->device());
  c10::DataPtr data = own->allocator()->allocate(bytes);
  std::memcpy(data.get(), own->data(), std::min(size_t(bytes), own->nbytes()));
  own->set_data_ptr_noswap(std::move(data));
  own->set_nbytes(bytes);
}

void release_pinned(void* pointer) {
  std::lock_guard<std::mutex> guard(lock);
  pinned.erase(pointer);
  free(pointer);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* pointer = size ? aligned_alloc(64, (size + 63) / 64 * 64) : nullptr;
    std::lock_guard<std::mutex> guard(lock);
    if (pointer) pinned.insert(pointer);
    return {pointer, pointer, &release_pinned, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} pinned_memory;

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> guard(lock);
  return pinned.count(pointer) > 0;
}

// ---- what torch asks a device ---------------------------------------------------------------------------------------

c10::Stream stream_of(c10::Device device, c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, device, id); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device getDevice() const override { return {c10::kCUDA, current_device}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "CUDA error: invalid device ordinal");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  int at(c10::Device device) const { return device.has_index() ? device.index() : current_device; }
  c10::Stream getStream(c10::Device device) const override { return stream_of(device, current_stream[at(device)]); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream_of(device, ++streams); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return stream_of(device, ++streams); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream before = getStream(stream.device());
    current_stream[at(stream.device())] = stream.id();
    return before;
  }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = &streams;  // any address: the event exists
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  bool isStreamCapturing(const c10::Stream&) const override { return false; }
  void synchronizeStream(const c10::Stream&) const override { waits("stream"); }
  void synchronizeEvent(void*) const override { waits("event"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { waits("device"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 1.0; }
} guard_impl;

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return kDevices; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex current_device() const override { return ::current_device; }
  c10::DeviceIndex getCurrentDevice() const override { return ::current_device; }
  void setCurrentDevice(c10::DeviceIndex index) const override { guard_impl.setDevice({c10::kCUDA, index}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return guard_impl.exchangeDevice({c10::kCUDA, index}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void deviceSynchronize(c10::DeviceIndex) const override { waits("device"); }
};

// ---- tensors --------------------------------------------------------------------------------------------------------

using at::Tensor;

bool on_gpu(const Tensor& t) { return t.defined() && t.is_cuda(); }

Tensor allocated(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype, int device) {
  c10::DeviceGuard on(c10::Device(c10::kCUDA, c10::DeviceIndex(device)));
  return at::detail::empty_strided_generic(sizes, strides, &device_memory, kKeys, dtype);
}

Tensor allocated(at::IntArrayRef sizes, at::ScalarType dtype, int device) {
  return allocated(sizes, c10::contiguous_strides(sizes), dtype, device);
}

Tensor host(const Tensor& t) {  // a CPU tensor on the same memory, which it keeps alive
  auto options = at::TensorOptions(t.scalar_type());
  if (t.storage().nbytes() == 0) return at::empty_strided(t.sizes(), t.strides(), options);
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), [kept = t.detach()](void*) {}, options);
}

Tensor shape(const Tensor& t) {
  return at::empty_strided(t.sizes(), t.strides(), at::TensorOptions(t.scalar_type()).device(at::kMeta));
}

const Tensor& resized(const Tensor& t, at::IntArrayRef sizes, std::optional<at::MemoryFormat> = {}) {
  auto* storage = t.storage().unsafeGetStorageImpl();
  int64_t bytes = (c10::multiply_integers(sizes) + t.storage_offset()) * int64_t(t.element_size());
  if (bytes > int64_t(storage->nbytes())) {
    c10::DeviceGuard on(t.device());
    auto data = device_memory.allocate(bytes);
    if (storage->nbytes()) std::memcpy(data.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(data));
    storage->set_nbytes(bytes);
  }
  t.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return t;
}

template <class F>
IValue mapped(const IValue& value, const F& f) {  // f of every tensor
  if (value.isTensor()) return value.toTensor().defined() ? IValue(f(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> out;
    for (const Tensor& t : value.toTensorVector()) out.push_back(t.defined() ? f(t) : t);
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> out;
    for (std::optional<Tensor> t : value.toOptionalTensorList())
      out.push_back(t && t->defined() ? std::optional<Tensor>(f(*t)) : t);
    return out;
  }
  if (value.isList() && value.toListRef().size() && value.toListRef()[0].isTensorList()) {  // of a collective
    c10::List<std::vector<Tensor>> out;
    for (const IValue& row : value.toListRef()) out.push_back(mapped(row, f).toTensorVector());
    return out;
  }
  return value;
}

// ---- one kernel for nearly all operations ---------------------------------------------------------------------------

const std::unordered_set<string> kIndexing = {"aten::index.Tensor", "aten::index.Tensor_out", "aten::_index_put_impl_"};
const std::unordered_set<string> kOnTwoDevices = {"aten::_fused_adam_", "aten::_fused_adamw_"};
const std::unordered_set<string> kSizeFromValues = {
    "aten::nonzero", "aten::nonzero.out", "aten::masked_select", "aten::masked_select.out",
    "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::unique_dim_consecutive", "aten::bincount", "aten::equal"};
const std::unordered_set<string> kNotForIntegers = {  // cuBLAS has no such products
    "aten::mm", "aten::mm.out", "aten::bmm", "aten::bmm.out", "aten::addmm", "aten::addmm.out", "aten::addmm_",
    "aten::mv", "aten::baddbmm", "aten::baddbmm.out", "aten::addmv.out", "aten::dot", "aten::vdot"};

using Arguments = std::vector<IValue>;

// The arguments of one call, replaced by CPU tensors or by shapes, and the way back.
struct Replaced {
  bool computes;
  int device;
  std::vector<std::pair<Tensor, Tensor>> pairs = {};  // given, replacement

  Tensor replace(const Tensor& t) {
    bool number = t.unsafeGetTensorImpl()->is_wrapped_number();  // a plain one of Python, which has no device
    if (!on_gpu(t) && (computes || number)) return t;
    for (auto& [given, other] : pairs)
      if (given.is_same(t)) return other;
    return pairs.emplace_back(t, computes ? host(t) : shape(t)).second;
  }

  Tensor restore(const Tensor& t) {
    if (computes && !t.device().is_cpu()) return t;
    for (auto& [given, other] : pairs) {
      if (other.is_same(t)) return given;
      if (computes && t.is_alias_of(other))
        return given.as_strided(t.sizes(), t.strides(), given.storage_offset() + t.storage_offset());
    }
    Tensor out = allocated(t.sizes(), t.strides(), t.scalar_type(), device);
    if (computes) host(out).copy_(t);
    else if (out.numel() <= limit) host(out).fill_(kNotComputed);
    return out;
  }

  std::vector<IValue> call(const c10::OperatorHandle& op, const Arguments& arguments) {  // results of the other kernel
    torch::jit::Stack stack;
    const auto& named = op.schema().arguments();
    for (size_t i = 0; i < arguments.size(); i++) {
      IValue value = mapped(arguments[i], [&](const Tensor& t) { return replace(t); });
      if (value.isDevice() && value.toDevice().is_cuda()) value = c10::Device(computes ? at::kCPU : at::kMeta);
      if (named[i].name() == "pin_memory" && value.isBool()) value = false;
      stack.push_back(value);
    }
    op.callBoxed(&stack);
    return stack;
  }

  void finish(std::vector<IValue>& results) {
    for (auto& [given, other] : pairs)
      if (on_gpu(given) && given.sizes() != other.sizes()) {  // an out= that did not fit
        resized(given, other.sizes());
        if (computes) host(given).copy_(other);
      }
    for (IValue& value : results) value = mapped(value, [&](const Tensor& t) { return restore(t); });
  }
};

int checked_device(const string& name, const Arguments& arguments) {
  int device = -1;
  string other;
  for (const IValue& value : arguments) {
    if (value.isDevice() && value.toDevice().is_cuda() && device < 0) device = guard_impl.at(value.toDevice());
    bool indices = kIndexing.count(name) && value.isOptionalTensorList();
    mapped(value, [&](const Tensor& t) {
      if (on_gpu(t)) {
        if (device < 0) device = t.device().index();
        TORCH_CHECK(device == t.device().index(), kOneDevice, device, " and ", t.device().str(), "! (", name, ")");
      } else if (t.dim() > 0 && indices) {
        waits("index from the host in " + name);
      } else if (t.dim() > 0 && !kOnTwoDevices.count(name)) {
        other = t.device().str();
      }
      return t;
    });
  }
  TORCH_CHECK(other.empty(), kOneDevice, device, " and ", other, "! (", name, ")");
  return device < 0 ? current_device : device;
}

IValue without_masks(const string& name, const IValue& indices, int device) {  // CUDA turns them into positions first
  c10::List<std::optional<Tensor>> out;
  for (std::optional<Tensor> t : indices.toOptionalTensorList()) {
    if (!t || !t->defined() || (t->scalar_type() != at::kBool && t->scalar_type() != at::kByte)) {
      out.push_back(t);
      continue;
    }
    waits("size of " + name + " by a mask");
    for (const Tensor& column : (on_gpu(*t) ? host(*t) : *t).nonzero().unbind(1)) {
      Tensor positions = allocated(column.sizes(), at::kLong, device);
      host(positions).copy_(column);
      out.push_back(positions);
    }
  }
  return out;
}

bool larger(const std::vector<IValue>& values) {
  int64_t numel = 0;
  for (const IValue& value : values)
    mapped(value, [&](const Tensor& t) { return numel = std::max(numel, t.numel()), t; });
  return numel > limit;
}

void give_back_pages(const Tensor& t) {  // of a large tensor that a group without communication has written
  if (t.numel() <= limit || !t.is_contiguous()) return;
  constexpr uintptr_t page = 4096;
  auto first = reinterpret_cast<uintptr_t>(t.data_ptr()), begin = (first + page - 1) / page * page;
  madvise(reinterpret_cast<void*>(begin), (first + t.nbytes() - begin) / page * page, MADV_DONTNEED);
}

void any_operation(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  size_t count = op.schema().arguments().size();
  Arguments arguments(stack->end() - count, stack->end());
  torch::jit::drop(*stack, count);
  string name = op.operator_name().name;
  if (!op.operator_name().overload_name.empty()) name += "." + op.operator_name().overload_name;
  if (limit != INT64_MAX && name.rfind("aten::_assert_async", 0) == 0) return;  // of values that nobody computed
  int device = checked_device(name, arguments);
  if (kNotForIntegers.count(name))
    for (const IValue& value : arguments)
      TORCH_CHECK_NOT_IMPLEMENTED(!value.isTensor() || !at::isIntegralType(value.toTensor().scalar_type(), true),
                                  '"', name, "\" not implemented for integers on CUDA");
  bool sized = kSizeFromValues.count(name) || (name == "aten::repeat_interleave.Tensor" && arguments[1].isNone());
  if (sized) waits("size of " + name);
  for (IValue& value : arguments)
    if (kIndexing.count(name) && value.isOptionalTensorList()) value = without_masks(name, value, device);
  c10::impl::ExcludeDispatchKeyGuard below(kAbove);
  std::vector<IValue> results;
  if (limit != INT64_MAX && !sized && name.rfind("c10d::", 0) != 0) {
    Replaced shapes{false, device};
    bool known = true, large = larger(arguments);
    try {
      results = shapes.call(op, arguments);
    } catch (const std::exception&) {  // some small operation has no meta kernel
      if (large) throw;
      known = false;
    }
    if (known && (large || larger(results))) {
      shapes.finish(results);
      stack->insert(stack->end(), results.begin(), results.end());
      return;
    }
  }
  Replaced values{true, device};
  results = values.call(op, arguments);
  for (auto& pair : values.pairs) give_back_pages(pair.first);
  values.finish(results);
  stack->insert(stack->end(), results.begin(), results.end());
}

// ---- operations of their own ----------------------------------------------------------------------------------------

int index_of(std::optional<at::Device> device) { return device ? guard_impl.at(*device) : current_device; }

Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard on(c10::Device(c10::kCUDA, c10::DeviceIndex(index_of(device))));
  return at::detail::empty_generic(sizes, &device_memory, kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  return allocated(sizes, strides, c10::dtype_or_default(dtype), index_of(device));
}

at::Scalar item(const Tensor& t) {
  waits("item");
  return host(t).item();
}

Tensor& copy(Tensor& to, const Tensor& from, bool non_blocking) {
  bool leaves = on_gpu(from) && !on_gpu(to), comes = on_gpu(to) && !on_gpu(from);
  if (leaves && !(non_blocking && is_pinned(to.storage().data()))) waits("copy to the host");
  if (comes && !(non_blocking && is_pinned(from.storage().data()))) waits("copy from the host");
  if (std::max(to.numel(), from.numel()) > limit) {
    TORCH_CHECK(at::is_expandable_to(from.sizes(), to.sizes()), "copy_ of ", from.sizes(), " to ", to.sizes());
    if (leaves && (to.scalar_type() != from.scalar_type() || !to.is_contiguous() || !from.is_contiguous()))
      allocated(to.sizes(), to.scalar_type(), from.device().index());  // CUDA converts on the source's device
    return to;
  }
  c10::impl::ExcludeDispatchKeyGuard below(kAbove);
  (on_gpu(to) ? host(to) : to).copy_(on_gpu(from) ? host(from) : from);
  return to;
}

void record_stream(Tensor&, c10::Stream) {}

std::vector<int64_t> product_sizes(const Tensor& a, const Tensor& b) {
  TORCH_CHECK(a.size(-1) == b.size(-2), "product of ", a.sizes(), " and ", b.sizes());
  if (a.dim() == 3) return {a.size(0), a.size(1), b.size(2)};
  return {a.size(0), b.size(1)};
}

Tensor& product_out(const Tensor& a, const Tensor& b, at::ScalarType dtype, Tensor& out) {  // bf16 factors, fp32 sums
  TORCH_CHECK(a.scalar_type() == b.scalar_type(), "expected m1 and m2 to have the same dtype");
  bool widens = dtype == at::kFloat && (a.scalar_type() == at::kHalf || a.scalar_type() == at::kBFloat16);
  TORCH_CHECK(dtype == a.scalar_type() || widens,
              "out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs");
  TORCH_CHECK(out.scalar_type() == dtype, "out_dtype must be the same as the dtype of the provided out tensor");
  TORCH_CHECK(on_gpu(a) && on_gpu(b) && on_gpu(out), kOneDevice, "n and cpu! (mm)");
  auto sizes = product_sizes(a, b);
  if (out.sizes() != at::IntArrayRef(sizes)) resized(out, sizes);
  if (std::max({a.numel(), b.numel(), out.numel()}) <= limit)
    host(out).copy_(host(a).to(dtype).matmul(host(b).to(dtype)));
  else if (out.numel() <= limit)
    host(out).fill_(kNotComputed);
  return out;
}

Tensor product(const Tensor& a, const Tensor& b, at::ScalarType dtype) {
  Tensor out = allocated(product_sizes(a, b), dtype, a.device().index());
  return product_out(a, b, dtype, out);
}

// ---- flash attention: [b, heads, t, d], causal masks aligned to the end ---------------------------------------------

int64_t attention_kernel(const Tensor& q, const Tensor& k, const Tensor&, const std::optional<Tensor>& mask, double,
                         bool causal, std::optional<double>, bool) {
  bool half = q.scalar_type() == at::kBFloat16 || q.scalar_type() == at::kHalf, masked = mask && mask->defined();
  bool flash = half && !masked && q.size(3) <= 256 && (!causal || q.size(2) == k.size(2));
  return int64_t(flash ? at::SDPBackend::flash_attention : at::SDPBackend::math);
}

struct Attention {  // in fp32 on the CPU, with as many keys as queries
  double scale;
  int64_t copies;
  Tensor q, k, v, scores;

  Attention(const Tensor& q_, const Tensor& k_, const Tensor& v_, bool causal, std::optional<double> scale_)
      : scale(scale_.value_or(1 / std::sqrt(double(q_.size(3))))), copies(q_.size(1) / k_.size(1)) {
    q = host(q_).to(at::kFloat);
    k = host(k_).to(at::kFloat).repeat_interleave(copies, 1);
    v = host(v_).to(at::kFloat).repeat_interleave(copies, 1);
    scores = q.matmul(k.transpose(2, 3)) * scale;
    int64_t rows = q.size(2), columns = k.size(2);
    if (causal) scores.masked_fill_(at::ones({rows, columns}, at::kBool).tril(columns - rows).logical_not(), -INFINITY);
  }
  Tensor of_groups(const Tensor& t) const { return copies == 1 ? t : t.unflatten(1, {-1, copies}).sum(2); }
};

bool computes_attention(const Tensor& q, const Tensor& k) {
  return std::max({q.numel(), k.numel(), q.size(0) * q.size(1) * q.size(2) * k.size(2)}) <= limit;
}

Tensor tokens_first(const Tensor& like) {  // [b, heads, t, d] in the layout of flash attention's results
  std::vector<int64_t> sizes = {like.size(0), like.size(2), like.size(1), like.size(3)};
  return allocated(sizes, like.scalar_type(), like.device().index()).transpose(1, 2);
}

using FlashResult = std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;

FlashResult flash(const Tensor& q, const Tensor& k, const Tensor& v, double, bool causal, bool,
                  std::optional<double> scale) {
  int device = q.device().index();
  Tensor out = tokens_first(q), sums = allocated({q.size(0), q.size(1), q.size(2)}, at::kFloat, device);
  if (computes_attention(q, k)) {
    Attention own(q, k, v, causal, scale);
    host(sums).copy_(own.scores.logsumexp(-1));
    host(out).copy_(own.scores.softmax(-1).matmul(own.v));
  } else if (out.numel() <= limit) {
    host(out).fill_(kNotComputed), host(sums).fill_(kNotComputed);
  }
  Tensor seed = allocated({2}, at::kUInt64, device), offset = allocated({}, at::kUInt64, device);
  return {out, sums, Tensor(), Tensor(), q.size(2), k.size(2), seed, offset, allocated({0}, q.scalar_type(), device)};
}

std::tuple<Tensor, Tensor, Tensor> flash_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& sums,
    const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double, bool causal, const Tensor&, const Tensor&,
    std::optional<double> scale) {
  int device = q.device().index();
  Tensor dq = tokens_first(q), dk = tokens_first(k), dv = tokens_first(v);
  // its own memory: sums of rows, dq in fp32, and dk, dv of every query's head
  Tensor rows = allocated(sums.sizes(), at::kFloat, device), wide = allocated(q.sizes(), at::kFloat, device);
  Tensor of_heads[2];
  if (q.size(1) != k.size(1))
    for (Tensor& t : of_heads) t = allocated({k.size(0), k.size(2), q.size(1), k.size(3)}, k.scalar_type(), device);
  if (computes_attention(q, k)) {
    Attention own(q, k, v, causal, scale);
    Tensor g = host(grad).to(at::kFloat), p = (own.scores - host(sums).unsqueeze(-1)).exp();
    Tensor ds = p * (g.matmul(own.v.transpose(2, 3)) - (g * host(out).to(at::kFloat)).sum(-1, true)) * own.scale;
    host(dq).copy_(ds.matmul(own.k));
    host(dk).copy_(own.of_groups(ds.transpose(2, 3).matmul(own.q)));
    host(dv).copy_(own.of_groups(p.transpose(2, 3).matmul(g)));
  } else {
    for (const Tensor& t : {dq, dk, dv})
      if (t.numel() <= limit) host(t).fill_(kNotComputed);
  }
  return {dq, dk, dv};
}

// ---- installation ---------------------------------------------------------------------------------------------------

const std::unordered_set<string> kKept = {  // CUDA's own change only metadata
    "aten::as_strided", "aten::view", "aten::_reshape_alias", "aten::unfold", "aten::is_set_to",
    "aten::set_.source_Storage", "aten::set_.source_Storage_storage_offset", "aten::set_.source_Tensor",
    "aten::view_as_real", "aten::view_as_complex"};

void install(std::function<void(string)> announce) {
  on_wait = new std::function<void(string)>(std::move(announce));  // as long as the process, like all that follows
  // torch has made its hooks when it was imported: from now on this object has our functions.
  static Hooks hooks;
  auto* own = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  *reinterpret_cast<void**>(own) = *reinterpret_cast<void**>(&hooks);
  c10::impl::registerDeviceGuard(c10::kCUDA, &guard_impl);
  c10::SetAllocator(c10::kCUDA, &device_memory, 255);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention_kernel);
  struct Silent final : c10::WarningHandler {  // each replaced kernel would be named
    void process(const c10::Warning&) override {}
  };
  static Silent no_warnings;
  c10::WarningUtils::WarningHandlerGuard quiet(&no_warnings);
  auto* aten = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  auto* c10d = new torch::Library(torch::Library::IMPL, "c10d", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  aten->impl("empty.memory_format", TORCH_FN(empty));
  aten->impl("empty_strided", TORCH_FN(empty_strided));
  aten->impl("_local_scalar_dense", TORCH_FN(item));
  aten->impl("copy_", TORCH_FN(copy));
  aten->impl("resize_", TORCH_FN(resized));
  aten->impl("record_stream", TORCH_FN(record_stream));
  aten->impl("mm.dtype", TORCH_FN(product));
  aten->impl("mm.dtype_out", TORCH_FN(product_out));
  aten->impl("bmm.dtype", TORCH_FN(product));
  aten->impl("bmm.dtype_out", TORCH_FN(product_out));
  aten->impl("_scaled_dot_product_flash_attention", TORCH_FN(flash));
  aten->impl("_scaled_dot_product_flash_attention_backward", TORCH_FN(flash_backward));
  const std::unordered_set<string> named = {
      "aten::empty.memory_format", "aten::empty_strided", "aten::_local_scalar_dense", "aten::copy_", "aten::resize_",
      "aten::record_stream", "aten::mm.dtype", "aten::mm.dtype_out", "aten::bmm.dtype", "aten::bmm.dtype_out",
      "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_backward"};
  for (const auto& op : c10::Dispatcher::singleton().getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
    string name = op.overload_name.empty() ? op.name : op.name + "." + op.overload_name;
    if (named.count(name) || kKept.count(name)) continue;
    bool collective = name.rfind("c10d::", 0) == 0;
    if (collective || name.rfind("aten::", 0) == 0)
      (collective ? c10d : aten)->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&any_operation>());
  }
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("install", &install);
  module.def("get_device", [] { return int(current_device); });
  module.def("exchange_device", [](int index) {
    int before = current_device;
    if (index >= 0) guard_impl.setDevice({c10::kCUDA, c10::DeviceIndex(index)});
    return before;
  });
  module.def("get_stream", [](int index) { return current_stream[index]; });
  module.def("set_stream", [](int index, c10::StreamId id) { current_stream[index] = id; });
  module.def("wait", &waits);
  module.def("shared", &shared);
  module.def("open_shared", &open_shared);
  module.def("live_bytes", [](int index) { return memory[index].live; });
  module.def("peak_bytes", [](int index) { return memory[index].peak; });
  module.def("allocations", [](int index) { return memory[index].blocks; });
  module.def("reset_peak", [](int index) { memory[index].peak = memory[index].live; });
  module.def("resize_storage", &resize_storage);
  module.def("set_limit", [](int64_t elements) { limit = elements; });
  module.def("set_capacity", [](int64_t bytes) { capacity = bytes; });
}
