// The device's parts that its operators need.
#pragma once
#include <ATen/core/Generator.h>
#include <c10/core/GeneratorImpl.h>

#include <optional>

#include "machine.h"

namespace c10 {
struct Allocator;
}

namespace sim {

extern thread_local int current_stream;

c10::Allocator* allocator();

// A generator of cuda:0.  As CUDA's, its state is a seed and an offset, 16 bytes, and every kernel draws from its own
// offset; here, from a generator of the host that they seed.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(uint64_t seed = 67280421310721ULL);
  void set_current_seed(uint64_t seed) override;
  void set_offset(uint64_t offset) override;
  uint64_t get_offset() const override;
  uint64_t current_seed() const override;
  uint64_t seed() override;
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;
  static c10::DeviceType device_type() { return c10::DeviceType::CUDA; }
  const at::Generator& draw();  // the host's generator for one kernel

 private:
  c10::GeneratorImpl* clone_impl() const override;
  at::Generator host_;
  uint64_t seed_ = 0;
  uint64_t offset_ = 0;
};

// The host's generator for one kernel that is given this generator of cuda; the default one without.
at::Generator host_generator(const std::optional<at::Generator>& given);

}  // namespace sim
