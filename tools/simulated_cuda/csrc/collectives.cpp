// NCCL's place: a c10d back end for tensors of the simulated device that sends with Gloo.
//
// As with NCCL, a communicator has a stream of its own.  A collective waits for the stream that is current when it is
// called, and `wait()` makes the stream that is current then wait for the collective.  Who uses a tensor in between is
// reported.  A work keeps its tensors until it is waited for.
#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <list>

#include "alias.h"
#include "device.h"

namespace sim {
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Start = std::function<WorkPtr()>;

Tensors aliases(const Tensors& tensors) {
  Tensors made;
  for (const at::Tensor& each : tensors) {
    TORCH_CHECK(each.is_cuda(), "No backend type associated with device type ", each.device().type(), ": NCCL takes cuda");
    made.push_back(alias_of(each));
  }
  return made;
}

std::vector<Tensors> aliases(const std::vector<Tensors>& lists) {
  std::vector<Tensors> made;
  for (const Tensors& each : lists) made.push_back(aliases(each));
  return made;
}

Tensors joined(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const Tensors& each : lists) all.insert(all.end(), each.begin(), each.end());
  return all;
}

std::vector<Range> ranges(const Tensors& tensors) {
  std::vector<Range> all;
  for (const at::Tensor& each : tensors) all.push_back(range_of(each));
  return all;
}

class SimulatedWork;
std::mutex pending_mutex;
std::list<SimulatedWork*> pending;  // not waited for

class SimulatedWork final : public c10d::Work {
 public:
  SimulatedWork(int rank, c10d::OpType type, std::vector<WorkPtr> inner, EventPtr end, Tensors kept, std::function<void()> after)
      : Work(rank, type), inner_(std::move(inner)), end_(std::move(end)), kept_(std::move(kept)), after_(std::move(after)) {
    std::lock_guard<std::mutex> guard(pending_mutex);
    pending.push_back(this);
  }
  ~SimulatedWork() override {
    forget();
    try {
      finish(kNoTimeout);
    } catch (...) {  // somebody else reports a broken connection
    }
  }
  bool isCompleted() override {
    for (const WorkPtr& each : inner_) {
      if (!each->isCompleted()) return false;
    }
    return true;
  }
  bool isSuccess() const override {
    for (const WorkPtr& each : inner_) {
      if (!each->isSuccess()) return false;
    }
    return true;
  }
  std::exception_ptr exception() const override {
    for (const WorkPtr& each : inner_) {
      if (each->exception()) return each->exception();
    }
    return nullptr;
  }
  int sourceRank() const override { return inner_.front()->sourceRank(); }
  std::vector<at::Tensor> result() override { return kept_; }
  void abort() override {
    for (const WorkPtr& each : inner_) each->abort();
  }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout) override {
    finish(timeout);
    forget();
    Machine::get().wait(current_stream, *end_);
    if (retrieveOpType() == c10d::OpType::BARRIER) Machine::get().wait_host_for_stream(current_stream, "barrier");
    kept_.clear();
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return inner_.front()->getFuture(); }

  // Waits for Gloo, once.
  void finish(std::chrono::milliseconds timeout) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (finished_) return;
    for (const WorkPtr& each : inner_) {
      // Of a coalesced operation: no wait of a stream, which only the caller of `wait` asks for.
      if (auto* own = dynamic_cast<SimulatedWork*>(each.get())) {
        own->finish(timeout);
      } else {
        each->wait(timeout);
      }
    }
    finished_ = true;
    if (after_) after_();
  }

 private:
  void forget() {
    std::lock_guard<std::mutex> guard(pending_mutex);
    pending.remove(this);
  }
  std::mutex mutex_;
  bool finished_ = false;
  std::vector<WorkPtr> inner_;
  EventPtr end_;
  Tensors kept_;
  std::function<void()> after_;
};

class SimulatedNccl final : public c10d::Backend {
 public:
  explicit SimulatedNccl(c10::intrusive_ptr<c10d::Backend> host)
      : Backend(host->getRank(), host->getSize()), host_(std::move(host)), stream_(Machine::get().new_stream()) {}

  const std::string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override { host_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return host_->getSequenceNumberForGroup(); }
  void abort() override { host_->abort(); }
  void shutdown() override { host_->shutdown(); }
  void setTimeout(std::chrono::milliseconds timeout) override { host_->setTimeout(timeout); }
  c10::intrusive_ptr<Options> getBackendOptions() override { return host_->getBackendOptions(); }
  void startCoalescing() override { coalesced_.emplace(); }
  WorkPtr endCoalescing() override {
    std::vector<WorkPtr> all = std::move(*coalesced_);
    coalesced_.reset();
    if (all.empty()) return nullptr;
    return c10::make_intrusive<SimulatedWork>(
        rank_, c10d::OpType::COALESCED, std::move(all), Machine::get().record(stream_), Tensors{}, nullptr);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return run(c10d::OpType::BROADCAST, "broadcast", tensors, tensors,
               [&, to = aliases(tensors)]() mutable { return host_->broadcast(to, options); });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto [sum, after] = summed(options, tensors);
    return run(c10d::OpType::ALLREDUCE, "all_reduce", tensors, tensors,
               [&, to = aliases(tensors)]() mutable { return host_->allreduce(to, sum); }, after);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto [sum, after] = summed(options, tensors);
    std::vector<WorkPtr> works;
    return run(c10d::OpType::ALLREDUCE_COALESCED, "all_reduce_coalesced", tensors, tensors,
               [&, to = aliases(tensors)]() mutable { return host_->allreduce_coalesced(to, sum); }, after);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto [sum, after] = summed(options, tensors);
    return run(c10d::OpType::REDUCE, "reduce", tensors, tensors,
               [&, to = aliases(tensors)]() mutable { return host_->reduce(to, sum); }, after);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return run(c10d::OpType::ALLGATHER, "all_gather", inputs, joined(outputs),
               [&, to = aliases(outputs), from = aliases(inputs)]() mutable { return host_->allgather(to, from, options); });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return run(c10d::OpType::_ALLGATHER_BASE, "all_gather_into_tensor", {input}, {output},
               [&, to = alias_of(output), from = alias_of(input)]() mutable { return host_->_allgather_base(to, from, options); });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return run(c10d::OpType::ALLGATHER_COALESCED, "all_gather_into_tensor_coalesced", inputs, outputs,
               [&, to = aliases(outputs), from = aliases(inputs)]() mutable {
                 return host_->allgather_into_tensor_coalesced(to, from, options);
               });
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return run(c10d::OpType::GATHER, "gather", inputs, joined(outputs),
               [&, to = aliases(outputs), from = aliases(inputs)]() mutable { return host_->gather(to, from, options); });
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    return run(c10d::OpType::SCATTER, "scatter", joined(inputs), outputs,
               [&, to = aliases(outputs), from = aliases(inputs)]() mutable { return host_->scatter(to, from, options); });
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    auto [sum, after] = summed(options, outputs);
    return run(c10d::OpType::REDUCE_SCATTER, "reduce_scatter", joined(inputs), outputs,
               [&, to = aliases(outputs), from = aliases(inputs)]() mutable { return host_->reduce_scatter(to, from, sum); }, after);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto [sum, after] = summed(options, {output});
    return run(c10d::OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_tensor", {input}, {output},
               [&, to = alias_of(output), from = alias_of(input)]() mutable { return host_->_reduce_scatter_base(to, from, sum); },
               after);
  }
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& sent, std::vector<int64_t>& received,
      const c10d::AllToAllOptions& options) override {
    return run(c10d::OpType::ALLTOALL_BASE, "all_to_all_single", {input}, {output},
               [&, to = alias_of(output), from = alias_of(input)]() mutable {
                 return host_->alltoall_base(to, from, sent, received, options);
               });
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return run(c10d::OpType::ALLTOALL, "all_to_all", inputs, outputs,
               [&, to = aliases(outputs), from = aliases(inputs)]() mutable { return host_->alltoall(to, from, options); });
  }
  WorkPtr send(Tensors& tensors, int to_rank, int tag) override {
    return run(c10d::OpType::SEND, "send", tensors, {},
               [&, from = aliases(tensors)]() mutable { return host_->send(from, to_rank, tag); });
  }
  WorkPtr recv(Tensors& tensors, int from_rank, int tag) override {
    return run(c10d::OpType::RECV, "recv", {}, tensors,
               [&, to = aliases(tensors)]() mutable { return host_->recv(to, from_rank, tag); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    c10d::BarrierOptions plain = options;
    plain.device_ids.clear();
    return run(c10d::OpType::BARRIER, "barrier", {}, {}, [&] { return host_->barrier(plain); });
  }

 private:
  // Gloo knows no average: it sums, and the sum is divided when it is there.
  template <class Options>
  std::pair<Options, std::function<void()>> summed(const Options& options, const Tensors& results) {
    Options sum = options;
    if (options.reduceOp.op_ != c10d::ReduceOp::AVG) return {sum, nullptr};
    sum.reduceOp = c10d::ReduceOp::SUM;
    return {sum, [hosts = aliases(results), size = size_] {
              Quiet quiet;
              for (const at::Tensor& each : hosts) at::Tensor(each).div_(size);
            }};
  }

  WorkPtr run(
      c10d::OpType type, const std::string& what, const Tensors& reads, const Tensors& writes, const Start& start,
      std::function<void()> after = nullptr) {
    Machine& machine = Machine::get();
    machine.wait(stream_, *machine.record(current_stream));
    WorkPtr inner;
    machine.launch_now(stream_, {what, ranges(reads), ranges(writes), [&] {
                                   Quiet quiet;
                                   inner = start();
                                 }});
    Tensors kept = reads;
    kept.insert(kept.end(), writes.begin(), writes.end());
    auto work = c10::make_intrusive<SimulatedWork>(
        rank_, type, std::vector<WorkPtr>{inner}, machine.record(stream_), std::move(kept), std::move(after));
    if (coalesced_.has_value()) coalesced_->push_back(work);
    return work;
  }

  c10::intrusive_ptr<c10d::Backend> host_;
  int stream_;
  std::optional<std::vector<WorkPtr>> coalesced_;
};

void finish_all() {
  std::lock_guard<std::mutex> guard(pending_mutex);
  for (SimulatedWork* each : pending) each->finish(kNoTimeout);
}

}  // namespace
}  // namespace sim

PYBIND11_MODULE(collectives, m) {
  sim::Machine::get().before_host_waits_for_all = &sim::finish_all;
  m.def("make", [](const c10::intrusive_ptr<c10d::Backend>& host) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<sim::SimulatedNccl>(host);
  });
}
