// CPU tensors over the memory of device tensors.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "machine.h"

namespace sim {

// A CPU tensor over the same memory.  It does not keep the memory alive: as on a GPU, only the allocator does.
at::Tensor alias_of(const at::Tensor& tensor);

// The bytes from a tensor's first element to its last.
Range range_of(const at::Tensor& tensor);

// Operators inside are seen by no autograd, no mode and no observer.
class Quiet {
 public:
  Quiet();

 private:
  c10::impl::ExcludeDispatchKeyGuard keys_;
  at::RecordFunctionGuard recording_;
};

}  // namespace sim
