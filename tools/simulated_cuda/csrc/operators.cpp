// Operators of the simulated device: each runs its CPU kernel on the same memory.
//
// One boxed fallback serves all operators that torch does not compose from others.  It replaces every tensor by a CPU
// tensor over the same memory ("alias"), tells the machine what is read and written, and hands the CPU kernel over as
// work of the current stream.  Work that only writes existing tensors may run later.  Work that makes tensors runs now
// (behind everything its stream waits for), since only the kernel knows their shapes.
//
// As on a GPU: an operator whose result the host reads, or whose result's shape depends on data, waits for the stream.
// Operators on mixed devices raise.
//
// Rejected: tensor subclasses with __torch_dispatch__.  They have no storage of their own, and the packages under test
// live on storages: views of buckets, `set_`, `data_ptr`, pinned pieces.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/op_registration/op_registration.h>
#include <ATen/native/ResizeCommon.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <unordered_map>
#include <unordered_set>

#include "alias.h"
#include "device.h"

namespace sim {

// -- aliases ---------------------------------------------------------------------------------------------------------------

at::Tensor alias_of(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  c10::DataPtr data(storage.mutable_data(), c10::Device(c10::DeviceType::CPU));
  auto host = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetAllocator(c10::DeviceType::CPU), true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(host)), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

Range range_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0) return {nullptr, nullptr};
  int64_t last = 0;
  for (int64_t axis = 0; axis < tensor.dim(); ++axis) last += (tensor.size(axis) - 1) * tensor.stride(axis);
  const char* low = static_cast<const char*>(tensor.storage().data()) + tensor.storage_offset() * tensor.itemsize();
  return {low, low + (last + 1) * int64_t(tensor.itemsize())};
}

Quiet::Quiet()
    : keys_(c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
            c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                                 c10::DispatchKey::Functionalize, c10::DispatchKey::PythonDispatcher})),
      recording_(false) {}

namespace {

bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }

at::Tensor empty_strided_on_device(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype) {
  return at::detail::empty_strided_generic(
      size, stride, allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
      dtype.value_or(c10::get_default_dtype_as_scalartype()));
}

// -- the fallback ----------------------------------------------------------------------------------------------------------

// Facts about an operator that its schema tells; computed once.
struct Facts {
  std::vector<bool> writes;         // by argument
  std::vector<int> returned;        // by result: the argument that is returned, or -1 for a new value
  bool makes_values = false;        // some result is new
  bool host_reads = false;          // the host reads a result, or needs one to know a shape
  bool draws = false;               // random numbers
  bool takes_host_indices = false;  // index tensors may be on the CPU
};

Facts facts_of(const c10::OperatorHandle& op) {
  Facts facts;
  const c10::FunctionSchema& schema = op.schema();
  for (const c10::Argument& argument : schema.arguments()) {
    facts.writes.push_back(argument.alias_info() != nullptr && argument.alias_info()->isWrite());
  }
  for (const c10::Argument& result : schema.returns()) {
    int from = -1;
    const c10::AliasInfo* alias = result.alias_info();
    if (alias != nullptr && alias->isWrite()) {
      for (size_t at = 0; at < schema.arguments().size(); ++at) {
        const c10::AliasInfo* other = schema.arguments()[at].alias_info();
        if (other != nullptr && other->isWrite() && other->beforeSets() == alias->beforeSets()) from = int(at);
      }
    }
    facts.returned.push_back(from);
    facts.makes_values |= from < 0;
    const c10::TypePtr type = result.type();
    facts.host_reads |= from < 0 && !type->isSubtypeOf(*c10::TensorType::get()) &&
                        !type->isSubtypeOf(*c10::ListType::ofTensors());
  }
  facts.host_reads |= op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape);
  facts.draws = op.hasTag(at::Tag::nondeterministic_seeded);
  const std::string& name = schema.name();
  facts.takes_host_indices = name.find("aten::index") == 0 || name.find("aten::_index_put") == 0;
  return facts;
}

const Facts& cached_facts(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static std::unordered_map<c10::OperatorHandle, Facts> known;
  std::lock_guard<std::mutex> guard(mutex);
  auto found = known.find(op);
  if (found == known.end()) found = known.emplace(op, facts_of(op)).first;
  return found->second;
}

struct Call {
  const c10::OperatorHandle& op;
  const Facts& facts;
  std::vector<Range> reads, writes;
  std::vector<std::pair<at::Tensor, at::Tensor>> written;  // (on the device, its alias)
  bool may_resize = false;

  at::Tensor replace(const at::Tensor& tensor, bool is_written) {
    if (!tensor.defined()) return tensor;
    if (!on_device(tensor)) {
      TORCH_CHECK(
          tensor.dim() == 0 || facts.takes_host_indices,
          "simulated CUDA: Expected all tensors to be on the same device, but ", op.schema().name(), " got one on ",
          tensor.device(), " beside cuda:0");
      if (is_written) return tensor;
      Quiet quiet;
      at::Tensor copy = tensor.clone();  // by value, as a kernel's argument
      copy.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
      return copy;
    }
    at::Tensor alias = alias_of(tensor);
    (is_written ? writes : reads).push_back(range_of(tensor));
    if (is_written) {
      written.emplace_back(tensor, alias);
      may_resize |= tensor.numel() == 0;
    }
    return alias;
  }

  c10::IValue replace_value(const c10::IValue& value, bool is_written) {
    if (value.isTensor()) return replace(value.toTensor(), is_written);
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& each : value.toTensorVector()) list.push_back(replace(each, is_written));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector()) {
        list.push_back(each.has_value() ? std::optional<at::Tensor>(replace(*each, is_written)) : std::nullopt);
      }
      return list;
    }
    if (value.isDevice()) {
      return value.toDevice().is_cuda() ? c10::IValue(c10::Device(c10::DeviceType::CPU)) : value;
    }
    if (value.isGenerator()) return host_generator(value.toGenerator());
    return value;
  }
};

// Copies now, behind the allocation's fill.
void fill_now(const at::Tensor& target, const at::Tensor& value) {
  Machine::get().launch_now(current_stream, {"a new tensor", {}, {range_of(target)}, [&, to = alias_of(target)] {
                                               Quiet quiet;
                                               at::AutoDispatchBelowADInplaceOrView below;
                                               to.copy_(value);
                                             }});
}

// Puts the results of a kernel that resized its output back into the output.
void write_back(const at::Tensor& target, const at::Tensor& alias) {
  if (alias.sizes() == target.sizes() && alias.data_ptr() == target.data_ptr()) return;
  if (alias.sizes() != target.sizes()) target.resize_(alias.sizes());
  fill_now(target, alias);
}

at::Tensor to_device(const at::Tensor& value) {
  if (!value.defined() || value.is_cuda()) return value;
  at::Tensor made = empty_strided_on_device(value.sizes(), value.strides(), value.scalar_type());
  fill_now(made, value);
  return made;
}

c10::IValue to_device_value(const c10::IValue& value) {
  if (value.isTensor()) return to_device(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorVector()) list.push_back(to_device(each));
    return list;
  }
  return value;
}

// Gives the CPU's default generator the state of the device's while a kernel draws.
class Draws {
 public:
  explicit Draws(bool wanted) : wanted_(wanted) {
    if (!wanted_) return;
    at::Generator host = at::detail::getDefaultCPUGenerator();
    before_ = host.get_state();
    host.set_state(host_generator(std::nullopt).get_state());
  }
  ~Draws() {
    if (!wanted_) return;
    at::Generator host = at::detail::getDefaultCPUGenerator();
    host.set_state(before_);
  }

 private:
  bool wanted_;
  at::Tensor before_;
};

void run_kernel(const c10::OperatorHandle& op, torch::jit::Stack& stack, bool draws) {
  Quiet quiet;
  at::AutoDispatchBelowADInplaceOrView below;
  Draws exchange(draws);
  op.callBoxed(stack);
}

void copy_bytes(const at::Tensor& target, const at::Tensor& source) {
  Quiet quiet;
  at::AutoDispatchBelowADInplaceOrView below;
  target.copy_(source);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Facts& facts = cached_facts(op);
  Call call{op, facts};
  const size_t num_arguments = facts.writes.size();
  const size_t begin = stack->size() - num_arguments;
  bool takes_generator = false;
  auto arguments = std::make_shared<torch::jit::Stack>();
  for (size_t at = 0; at < num_arguments; ++at) {
    const c10::IValue& value = (*stack)[begin + at];
    takes_generator |= value.isGenerator();
    arguments->push_back(call.replace_value(value, facts.writes[at]));
  }
  const bool draws = facts.draws && !takes_generator;
  Machine& machine = Machine::get();
  if (facts.host_reads) machine.wait_host_for_stream(current_stream, op.schema().name());
  std::vector<c10::IValue> results;
  for (size_t at = 0; at < facts.returned.size(); ++at) {
    results.push_back(facts.returned[at] < 0 ? c10::IValue() : (*stack)[begin + facts.returned[at]]);
  }
  Work work{op.schema().name(), std::move(call.reads), std::move(call.writes), nullptr};
  if (!facts.makes_values && !call.may_resize && !facts.draws) {
    work.run = [arguments, handle = c10::OperatorHandle(op)] {
      torch::jit::Stack copy(*arguments);
      run_kernel(handle, copy, false);
    };
    machine.launch(current_stream, std::move(work));
  } else if (machine.is_capturing()) {
    // Runs now for its shapes, and at every replay into the same results.
    auto kept = std::make_shared<std::vector<c10::IValue>>();
    auto moved = std::make_shared<std::vector<std::pair<at::Tensor, at::Tensor>>>();
    work.run = [arguments, kept, moved, draws, handle = c10::OperatorHandle(op)] {
      torch::jit::Stack copy(*arguments);
      run_kernel(handle, copy, draws);
      for (auto& [to, from] : *moved) copy_bytes(to, from);
      if (kept->empty()) {
        *kept = std::vector<c10::IValue>(copy.begin(), copy.end());
        return;
      }
      Quiet quiet;
      for (size_t at = 0; at < copy.size(); ++at) {
        if (copy[at].isTensor() && (*kept)[at].isTensor()) (*kept)[at].toTensor().copy_(copy[at].toTensor());
      }
    };
    machine.launch_now(current_stream, std::move(work));
    for (auto& [target, alias] : call.written) {  // outputs that the kernel has resized are elsewhere
      if (alias.sizes() == target.sizes() && alias.data_ptr() == target.data_ptr()) continue;
      if (alias.sizes() != target.sizes()) target.resize_(alias.sizes());
      moved->emplace_back(alias_of(target), alias);
    }
    for (size_t at = 0; at < results.size(); ++at) {
      if (facts.returned[at] >= 0) continue;
      results[at] = to_device_value((*kept)[at]);
      if (results[at].isTensor() && results[at].toTensor().defined()) (*kept)[at] = alias_of(results[at].toTensor());
    }
  } else {
    torch::jit::Stack copy(*arguments);
    work.run = [&] { run_kernel(op, copy, draws); };
    machine.launch_now(current_stream, std::move(work));
    for (auto& [target, alias] : call.written) write_back(target, alias);
    for (size_t at = 0; at < results.size(); ++at) {
      if (facts.returned[at] < 0) results[at] = to_device_value(copy[copy.size() - results.size() + at]);
    }
  }
  torch::jit::drop(*stack, num_arguments);
  for (c10::IValue& each : results) stack->push_back(std::move(each));
}

// -- operators that torch has to be told about --------------------------------------------------------------------------------

at::Tensor empty_memory_format(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  return at::detail::empty_generic(
      size, allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
      dtype.value_or(c10::get_default_dtype_as_scalartype()), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  return empty_strided_on_device(size, stride, dtype);
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  if (storage.nbytes() == bytes) return;
  c10::DataPtr data = allocator()->allocate(bytes);
  const size_t kept = std::min(bytes, storage.nbytes());
  if (kept != 0) {
    const char* source = static_cast<const char*>(storage.data());
    char* target = static_cast<char*>(data.get());
    Machine::get().launch(
        current_stream, {"resize_", {{source, source + kept}}, {{target, target + kept}},
                         [target, source, kept] { std::memcpy(target, source, kept); }});
  }
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(bytes);
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const size_t bytes = at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
  if (self.storage().nbytes() < bytes) resize_storage(self.storage(), bytes);
  if (format.has_value()) impl->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  if (stride.data() == nullptr || stride.empty()) {
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  } else {
    self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  }
  const size_t bytes = at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(), offset);
  if (self.storage().nbytes() < bytes) resize_storage(self.storage(), bytes);
  return self;
}

at::Tensor& set_empty(at::Tensor& self) {
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), 0, allocator()->allocate(0), allocator(), true);
  return set_storage(self, std::move(storage), 0, {0}, {});
}

void record_stream(at::Tensor& self, at::Stream stream) {
  if (self.has_storage()) Machine::get().record_stream(self.storage().data(), int(stream.id()));
}

int64_t math_attention(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0;  // composed from matmul and softmax
}

// A copy between device and host passes through memory of the same dtype and layout, as torch does it.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  Machine& machine = Machine::get();
  if (self.numel() == 0 || (self.storage().data() == source.storage().data() && self.is_same(source))) return self;
  const bool down = !self.is_cuda();
  const bool up = !source.is_cuda();
  if (!down && !up) {
    machine.launch(current_stream, {"copy_", {range_of(source)}, {range_of(self)},
                                    [to = alias_of(self), from = alias_of(source)] { copy_bytes(to, from); }});
    return self;
  }
  const at::Tensor wide = source.sizes() == self.sizes() ? source : source.expand(self.sizes());
  const bool plain = self.scalar_type() == source.scalar_type() && self.is_contiguous() && wide.is_contiguous();
  const at::Tensor& host = down ? self : source;
  const bool pinned = plain && machine.is_pinned(host.storage().data());
  const std::string what = down ? "copy_ to the host" : "copy_ from the host";
  if (up) {
    at::Tensor from = source;
    Work work{what, {}, {range_of(self)}, nullptr};
    if (pinned) {
      work.reads.push_back(range_of(source));
    } else {
      const Range range = range_of(source);
      machine.host_access(range.low, size_t(range.high - range.low), false, what);
      Quiet quiet;
      from = source.clone();  // the driver stages it
    }
    work.run = [to = alias_of(self), from] { copy_bytes(to, from); };
    machine.launch(current_stream, std::move(work));
    if (!non_blocking) machine.wait_host_for_stream(current_stream, what);
    return self;
  }
  Work work{what, {range_of(source)}, {range_of(self)}, nullptr};
  work.run = [to = self.detach(), from = alias_of(source)] { copy_bytes(to, from); };
  machine.launch(current_stream, std::move(work));
  if (!non_blocking || !pinned) machine.wait_host_for_stream(current_stream, what);
  return self;
}

at::Tensor pin_memory(const at::Tensor& self, std::optional<at::Device>) {
  const Range range = range_of(self);
  if (range.low != nullptr) Machine::get().host_access(range.low, size_t(range.high - range.low), false, "pin_memory");
  at::Tensor pinned = at::empty_like(self, self.options().pinned_memory(true));
  Quiet quiet;
  pinned.copy_(self);
  return pinned;
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("view.dtype", TORCH_FN(at::native::view_dtype));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", TORCH_FN(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("set_", set_empty);
  m.impl("record_stream", record_stream);
  m.impl("_fused_sdp_choice", math_attention);
  m.impl("copy_", copy_);
  m.impl("_pin_memory", pin_memory);
}

TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("_pin_memory", pin_memory);
}

// -- the host's accesses to pinned memory ----------------------------------------------------------------------------------------

// Arguments that an operator reads and writes; empty for views and for what only asks for shapes.
struct HostFacts {
  bool counts = false;
  std::vector<bool> writes;
};

HostFacts host_facts_of(const c10::FunctionSchema& schema) {
  static const std::unordered_set<std::string> metadata = {
      "aten::empty_like", "aten::new_empty", "aten::new_empty_strided", "aten::zeros_like", "aten::ones_like",
      "aten::full_like", "aten::new_zeros", "aten::new_full", "aten::is_pinned", "aten::set_", "aten::result_type",
      "aten::requires_grad_", "aten::is_same_size", "aten::_has_compatible_shallow_copy_type", "aten::set_data",
      "aten::rand_like", "aten::randn_like", "aten::record_stream", "aten::_pin_memory", "aten::resize_",
      "aten::is_same_storage", "aten::_version", "aten::numel", "aten::_backward", "aten::is_set_to"};
  HostFacts facts;
  bool is_view = false;
  for (const c10::Argument& argument : schema.arguments()) {
    const c10::AliasInfo* alias = argument.alias_info();
    facts.writes.push_back(alias != nullptr && alias->isWrite());
    is_view |= alias != nullptr && !alias->isWrite();
  }
  facts.counts = !is_view && metadata.count(schema.name()) == 0;
  return facts;
}

void touch(const c10::IValue& value, bool writes, const std::string& name) {
  const auto one = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != c10::DeviceType::CPU || !tensor.has_storage()) return;
    const Range range = range_of(tensor);
    if (range.low != nullptr) Machine::get().host_access(range.low, size_t(range.high - range.low), writes, name);
  };
  if (value.isTensor()) {
    one(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& each : value.toTensorVector()) one(each);
  }
}

bool mentions_device(c10::ArrayRef<const c10::IValue> values) {
  for (const c10::IValue& value : values) {
    if (value.isTensor() && on_device(value.toTensor())) return true;
    if (value.isTensorList()) {
      for (const at::Tensor& each : value.toTensorVector()) {
        if (on_device(each)) return true;
      }
    }
  }
  return false;
}

std::unique_ptr<at::ObserverContext> on_operator(const at::RecordFunction& function) {
  if (Machine::get().stats.pinned == 0) return nullptr;
  static std::mutex mutex;
  static std::unordered_map<std::string, HostFacts> known;
  const std::optional<c10::OperatorName> name = function.operator_name();
  if (!name.has_value()) return nullptr;
  const std::string key = name->name + "." + name->overload_name;
  HostFacts facts;
  {
    std::lock_guard<std::mutex> guard(mutex);
    auto found = known.find(key);
    if (found == known.end()) {
      const auto schema = function.operator_schema();
      found = known.emplace(key, schema.has_value() ? host_facts_of(*schema) : HostFacts()).first;
    }
    facts = found->second;
  }
  const auto inputs = function.inputs();
  if (!facts.counts || inputs.size() != facts.writes.size() || mentions_device(inputs)) return nullptr;
  for (size_t at = 0; at < inputs.size(); ++at) touch(inputs[at], facts.writes[at], name->name);
  return nullptr;
}

struct Observer {
  Observer() {
    at::addGlobalCallback(
        at::RecordFunctionCallback(&on_operator).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  }
} observer;

}  // namespace
}  // namespace sim
