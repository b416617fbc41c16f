// What torch asks of a device: guard, hooks, allocators, generators.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/Utils.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "device.h"

namespace sim {

thread_local int current_stream = DEFAULT_STREAM;

namespace {

constexpr c10::DeviceType CUDA = c10::DeviceType::CUDA;
const c10::Device DEVICE(CUDA, 0);

void check_device(c10::Device device) {
  TORCH_CHECK(device.index() <= 0, "simulated CUDA: there is one device, cuda:0; got ", device);
}

EventPtr& event_of(void* event) { return *static_cast<EventPtr*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return CUDA; }
  c10::Device exchangeDevice(c10::Device device) const override { check_device(device); return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device device) const override { check_device(device); }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream stream(int id) const { return c10::Stream(c10::Stream::UNSAFE, DEVICE, id); }
  c10::Stream getStream(c10::Device) const override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(DEFAULT_STREAM); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(Machine::get().new_stream()); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(Machine::get().new_stream()); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const int before = current_stream;
    current_stream = int(next.id());
    return stream(before);
  }
  void* getStreamNativeHandle(const c10::Stream given) const override { return reinterpret_cast<void*>(given.id()); }
  bool queryStream(const c10::Stream& given) const override { return Machine::get().query_stream(int(given.id())); }
  void synchronizeStream(const c10::Stream& given) const override {
    Machine::get().wait_host_for_stream(int(given.id()), "synchronize a stream");
  }
  bool isStreamCapturing(const c10::Stream&) const override { return Machine::get().is_capturing(); }
  void synchronizeDevice(const c10::DeviceIndex) const override { Machine::get().wait_host_for_all(); }

  void record(void** event, const c10::Stream& given, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new EventPtr(std::make_shared<Event>());
    event_of(*event) = Machine::get().record(int(given.id()));
  }
  void block(void* event, const c10::Stream& given) const override {
    if (event != nullptr) Machine::get().wait(int(given.id()), *event_of(event));
  }
  bool queryEvent(void* event) const override { return event == nullptr || Machine::get().query(*event_of(event)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) Machine::get().wait_host(*event_of(event), "synchronize an event");
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventPtr*>(event);
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    return (event_of(end)->seconds - event_of(begin)->seconds) * 1e3;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& given) const override {
    Machine::get().record_stream(data.get(), int(given.id()));
  }
};

void release(void* data) { Machine::get().release(data); }

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes == 0 ? nullptr : Machine::get().allocate(current_stream, bytes);
    return {data, data, &release, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes == 0 ? nullptr : Machine::get().allocate_pinned(bytes);
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
};

DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;

bool hands_out_default = false;  // to the next one who asks for a new generator: Python's only way to it

const at::Generator& default_generator() {
  static const at::Generator generator = at::make_generator<Generator>();
  return generator;
}

}  // namespace

c10::Allocator* allocator() { return &device_allocator; }

// -- kernels of the CPU shim ---------------------------------------------------------------------------------------------

using Touch = void (*)(uint64_t address, int bytes, int writes);
std::array<std::vector<Range>, 2> touched;  // by the running kernel: reads, writes; the machine's lock is held
thread_local std::string last_error;

void touch(uint64_t address, int bytes, int writes) {
  const char* low = reinterpret_cast<const char*>(address);
  std::vector<Range>& list = touched[writes];
  if (!list.empty() && list.back().high == low) {
    list.back().high = low + bytes;
  } else {
    list.push_back({low, low + bytes});
  }
}

std::vector<Range> merged(std::vector<Range> ranges) {
  std::sort(ranges.begin(), ranges.end(), [](const Range& one, const Range& other) { return one.low < other.low; });
  std::vector<Range> result;
  for (const Range& each : ranges) {
    if (!result.empty() && each.low <= result.back().high) {
      result.back().high = std::max(result.back().high, each.high);
    } else {
      result.push_back(each);
    }
  }
  return result;
}

// -- random numbers ------------------------------------------------------------------------------------------------------

Generator::Generator(uint64_t seed)
    : GeneratorImpl(DEVICE, c10::DispatchKeySet(c10::DispatchKey::CUDA)), host_(at::make_generator<at::CPUGeneratorImpl>()) {
  seed_ = seed;
}
void Generator::set_current_seed(uint64_t seed) {
  seed_ = seed;
  offset_ = 0;
}
void Generator::set_offset(uint64_t offset) { offset_ = offset; }
uint64_t Generator::get_offset() const { return offset_; }
uint64_t Generator::current_seed() const { return seed_; }
uint64_t Generator::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom(true));
  return seed_;
}
void Generator::set_state(const c10::TensorImpl& state) {
  TORCH_CHECK(state.numel() == 2 * sizeof(uint64_t), "RNG state is wrong size");
  const auto* words = static_cast<const char*>(state.data());
  std::memcpy(&seed_, words, sizeof(uint64_t));
  std::memcpy(&offset_, words + sizeof(uint64_t), sizeof(uint64_t));
}
c10::intrusive_ptr<c10::TensorImpl> Generator::get_state() const {
  at::Tensor state = at::detail::empty_cpu({2 * sizeof(uint64_t)}, at::kByte);
  std::memcpy(state.data_ptr(), &seed_, sizeof(uint64_t));
  std::memcpy(static_cast<char*>(state.data_ptr()) + sizeof(uint64_t), &offset_, sizeof(uint64_t));
  return state.getIntrusivePtr();
}
c10::GeneratorImpl* Generator::clone_impl() const {
  auto* copy = new Generator(seed_);
  copy->offset_ = offset_;
  return copy;
}
const at::Generator& Generator::draw() {
  host_.set_current_seed((seed_ + 1) * 6364136223846793005ULL ^ (offset_ * 1442695040888963407ULL));
  offset_ += 4;
  return host_;
}

at::Generator host_generator(const std::optional<at::Generator>& given) {
  const at::Generator& from = given.has_value() && given->defined() ? *given : default_generator();
  TORCH_CHECK(from.device().is_cuda(), "simulated CUDA: expected a generator of cuda, got one of ", from.device());
  return static_cast<Generator*>(from.unsafeGetGeneratorImpl())->draw();
}

}  // namespace sim

// -- registration --------------------------------------------------------------------------------------------------------

struct CUDAHooks final : at::CUDAHooksInterface {  // the name that torch looks up
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return sim::default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    if (std::exchange(sim::hands_out_default, false)) return sim::default_generator();
    return at::make_generator<sim::Generator>();
  }
  at::Device getDeviceFromPtr(void*) const override { return sim::DEVICE; }
  bool isPinnedPtr(const void* data) const override { return sim::Machine::get().is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &sim::pinned_allocator; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &sim::device_allocator; }
  void deviceSynchronize(c10::DeviceIndex) const override { sim::Machine::get().wait_host_for_all(); }
};

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks)
}

namespace {
c10::impl::DeviceGuardImplRegistrar guard_registrar(c10::DeviceType::CUDA, new sim::Guard());
struct Registrar {
  Registrar() { c10::SetAllocator(c10::DeviceType::CUDA, &sim::device_allocator); }
} registrar;
}  // namespace

// -- what Python asks (ctypes) -------------------------------------------------------------------------------------------

using sim::Machine;

extern "C" {
int64_t sim_current_stream() { return sim::current_stream; }
void sim_set_stream(int64_t stream) { sim::current_stream = int(stream); }
void sim_hand_out_default_generator() { sim::hands_out_default = true; }
void sim_replay(void* graph) {
  try {
    Machine::get().replay(static_cast<sim::Graph*>(graph), sim::current_stream);
  } catch (const std::runtime_error&) {  // kept for take_violations
  }
}
void sim_synchronize() { Machine::get().wait_host_for_all(); }
void sim_reset_order() { Machine::get().reset_order(); }
void sim_schedule(const char* name) { Machine::get().schedule(name); }
void sim_checks(bool wanted) { Machine::get().checks = wanted; }
void sim_empty_cache() { Machine::get().empty_cache(); }
bool sim_is_capturing() { return Machine::get().is_capturing(); }
void* sim_new_graph() { return new sim::Graph(); }
void sim_begin_capture(void* graph) { Machine::get().begin_capture(static_cast<sim::Graph*>(graph), sim::current_stream); }
void sim_end_capture() { Machine::get().end_capture(); }
void sim_delete_graph(void* graph) { delete static_cast<sim::Graph*>(graph); }
void sim_stats(int64_t* out) {
  const sim::Stats& stats = Machine::get().stats;
  const int64_t all[] = {stats.allocated, stats.peak_allocated, stats.reserved, stats.peak_reserved, stats.pinned,
                         stats.num_allocations, stats.num_host_waits, stats.num_reused};
  std::copy(std::begin(all), std::end(all), out);
}
void sim_reset_peak() {
  sim::Stats& stats = Machine::get().stats;
  stats.peak_allocated = stats.allocated;
  stats.peak_reserved = stats.reserved;
}
// Returns text that is valid until the next call of this thread.
const char* sim_take_violations() {
  thread_local std::string text;
  text = Machine::get().take_violations();
  return text.c_str();
}
const char* sim_waits() {
  thread_local std::string text;
  text.clear();
  for (const auto& [what, count] : Machine::get().waits) text += what + "=" + std::to_string(count) + "\n";
  return text.c_str();
}
void sim_host_access(const void* data, size_t bytes, bool writes, const char* what) {
  Machine::get().host_access(data, bytes, writes, what);
}
// Launches a kernel of the CPU shim, which tells `*hook` of its loads and stores.  True if an access is not ordered.
bool sim_launch_kernel(
    const char* name, void* function, void* hook, int64_t num_blocks, const char* args, size_t bytes, int64_t stream) {
  using Kernel = int (*)(int64_t, const void*);
  const std::string struct_bytes(args, bytes);
  const auto run = [=](std::vector<sim::Range>& reads, std::vector<sim::Range>& writes) {
    sim::touched = {};
    *static_cast<sim::Touch*>(hook) = &sim::touch;
    const int failed = reinterpret_cast<Kernel>(function)(num_blocks, struct_bytes.data());
    *static_cast<sim::Touch*>(hook) = nullptr;
    // Tables, norms and counts, which the struct points to, are read and written plainly.
    for (size_t at = 0; at + sizeof(char*) <= struct_bytes.size(); at += sizeof(char*)) {
      const char* pointer = nullptr;
      std::memcpy(&pointer, struct_bytes.data() + at, sizeof(pointer));
      if (Machine::get().is_device(pointer)) sim::touched[1].push_back({pointer, pointer + sizeof(double)});
    }
    reads = sim::merged(sim::touched[0]);
    writes = sim::merged(sim::touched[1]);
    if (failed != 0) throw std::runtime_error("simulated CUDA: threads of a kernel wait for others that are gone");
  };
  try {
    Machine::get().launch_traced(int(stream), name, run);
    return false;
  } catch (const std::runtime_error& error) {
    sim::last_error = error.what();
    return true;
  }
}
const char* sim_last_error() { return sim::last_error.c_str(); }
void sim_record_stream(const void* data, int64_t stream) { Machine::get().record_stream(data, int(stream)); }
bool sim_is_device(const void* data) { return Machine::get().is_device(data); }
}
