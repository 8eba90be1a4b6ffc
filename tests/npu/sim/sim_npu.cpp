// A device named "npu" that keeps its tensors in host memory and runs every operator on the CPU.
//
// It stands in for Ascend hardware in tests: a PrivateUse1 backend as torch_npu is one, so a tensor has to be moved to
// it, and an operator that gets tensors of two devices raises. What it computes is bit for bit what the CPU computes.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/stack.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <unordered_map>

namespace {

constexpr auto kNpu = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;
const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

thread_local c10::DeviceIndex current = 0;

void select(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < kDevices, "npu:", static_cast<int>(index), " does not exist");
  current = index;
}

c10::DeviceIndex exchange(c10::DeviceIndex index) {
  const auto old = current;
  if (index >= 0) select(index);
  return old;
}

// ---- counters, read from Python -------------------------------------------------------------------------------------

std::atomic<int64_t> operators{0}, synchronizations{0};

struct Memory {
  std::mutex mutex;
  std::array<int64_t, kDevices> live{}, peak{};
  std::unordered_map<void*, std::pair<c10::DeviceIndex, int64_t>> blocks;
} memory;

// ---- memory ---------------------------------------------------------------------------------------------------------

void release(void* pointer) {
  {
    std::lock_guard<std::mutex> lock(memory.mutex);
    const auto block = memory.blocks.find(pointer);
    memory.live[block->second.first] -= block->second.second;
    memory.blocks.erase(block);
  }
  c10::free_cpu(pointer);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kNpu, current);
    if (bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, device};
    void* pointer = c10::alloc_cpu(bytes);
    std::lock_guard<std::mutex> lock(memory.mutex);
    memory.blocks[pointer] = {current, static_cast<int64_t>(bytes)};
    memory.live[current] += static_cast<int64_t>(bytes);
    memory.peak[current] = std::max(memory.peak[current], memory.live[current]);
    return {pointer, pointer, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} allocator;
REGISTER_ALLOCATOR(kNpu, &allocator);

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  const auto old = exchange(storage.device().index());
  auto data = allocator.allocate(bytes);
  select(old);
  if (const auto kept = std::min(impl->nbytes(), bytes)) std::memcpy(data.get(), storage.data(), kept);
  impl->set_data_ptr_noswap(std::move(data));
  impl->set_nbytes(bytes);
}

// ---- what torch asks a backend --------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kNpu; }
  c10::Device getDevice() const override { return {kNpu, current}; }
  c10::Device exchangeDevice(c10::Device d) const override { return {kNpu, exchange(d.index())}; }
  void setDevice(c10::Device d) const override { select(d.index()); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { current = d.index(); }
  c10::Stream getStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getDefaultStream(c10::Device d) const override { return getStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const override { return s; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { ++synchronizations; }
  void synchronizeDevice(c10::DeviceIndex) const override { ++synchronizations; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex i) const override { select(i); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex i) const override { return exchange(i); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex i) const override { return exchange(i); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<at::CPUGeneratorImpl>(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Device getDeviceFromPtr(void*) const override { return {kNpu, current}; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t bytes) const override { resize_storage(s, bytes); }
} hooks;
const bool registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

// ---- the few operators that a backend has to bring: making, viewing and moving tensors ------------------------------

at::Tensor host(const at::Tensor& t) {  // the same bytes, seen as a CPU tensor
  if (t.device().is_cpu()) return t;
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), t.options().device(at::kCPU).requires_grad(false));
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const auto old = exchange(device ? device->index() : -1);
  auto out = at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, kKeys, c10::dtype_or_default(dtype), format);
  select(old);
  return out;
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const auto old = exchange(device ? device->index() : -1);
  auto out = at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                               &allocator, kKeys, c10::dtype_or_default(dtype));
  select(old);
  return out;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool) {
  host(to).copy_(host(self));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  const size_t bytes = (impl->storage_offset() + impl->numel()) * impl->itemsize();
  if (bytes > self.storage().nbytes()) resize_storage(self.storage(), bytes);
  return self;
}

at::Scalar item(const at::Tensor& t) { return host(t).item(); }

at::Tensor as_strided(const at::Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           offset ? std::make_optional(offset->expect_int()) : std::nullopt);
}

at::Tensor view(const at::Tensor& t, c10::SymIntArrayRef size) {
  return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_storage(at::Tensor& t, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(t, storage, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size),
                                      C10_AS_INTARRAYREF_SLOW(stride));
}

// Everything else: no tensor may lie elsewhere (a CPU scalar may, as on every device), then the CPU computes.
void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  ++operators;
  const auto check = [&](const at::Tensor& t) {
    TORCH_CHECK(!t.defined() || !t.device().is_cpu() || t.dim() == 0, op.schema().name(),
                ": Expected all tensors to be on the same device, but found at least two devices, npu and cpu!");
  };
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor()) check(value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor& t : value.toTensorList()) check(t);
    if (value.isOptionalTensorList())
      for (const std::optional<at::Tensor>& t : value.toOptionalTensorList())
        if (t) check(*t);
  }
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize);
  m.impl("_local_scalar_dense", item);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("set_.source_Storage_storage_offset", set_storage);
}

}  // namespace

extern "C" {
int sim_npu_devices() { return kDevices; }
int sim_npu_current() { return current; }
void sim_npu_select(int index) { current = static_cast<c10::DeviceIndex>(index); }
int64_t sim_npu_operators() { return operators; }
int64_t sim_npu_synchronizations() { return synchronizations; }
int64_t sim_npu_allocated(int index) { return memory.live[index]; }
int64_t sim_npu_peak(int index) { return memory.peak[index]; }
void sim_npu_reset_peak(int index) { memory.peak[index] = memory.live[index]; }
}
