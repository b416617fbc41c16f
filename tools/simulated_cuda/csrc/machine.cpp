#include "machine.h"

#include <Python.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace sim {

namespace {

constexpr size_t QUANTUM = 512;                      // of the caching allocator
constexpr size_t RESERVED_AT_MOST = size_t(1) << 30;  // before idle memory goes back to the system

std::string name_of(int actor) {
  if (actor == HOST) return "the host";
  return actor == DEFAULT_STREAM + 1 ? "the default stream" : "stream " + std::to_string(actor - 1);
}

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

// A thread that holds the interpreter's lock must not keep it while it waits: the thread inside may need it.
class Machine::Lock {
 public:
  explicit Lock(Machine& machine) : mutex_(machine.mutex_) {
    if (mutex_.try_lock()) return;
    if (Py_IsInitialized() && PyGILState_Check()) {
      PyThreadState* state = PyEval_SaveThread();
      mutex_.lock();
      PyEval_RestoreThread(state);
    } else {
      mutex_.lock();
    }
  }
  ~Lock() { mutex_.unlock(); }

 private:
  std::recursive_mutex& mutex_;
};

Machine& Machine::get() {
  static Machine* machine = new Machine();  // tensors outlive static objects
  return *machine;
}

// -- clocks ----------------------------------------------------------------------------------------------------------

void Machine::join(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size(), 0);
  for (size_t at = 0; at < from.size(); ++at) into[at] = std::max(into[at], from[at]);
}

uint64_t Machine::tick(int actor) {
  Clock& clock = actor == HOST ? host_ : streams_[actor - 1].clock;
  if (clock.size() <= size_t(actor)) clock.resize(actor + 1, 0);
  if (actor != HOST) return clock[actor] = streams_[actor - 1].num_put + 1;
  return ++clock[actor];
}

bool Machine::covers(const Clock& clock, const Access& access) const {
  return size_t(access.actor) < clock.size() && clock[access.actor] >= access.time;
}

Block* Machine::find(const void* data) {
  auto next = blocks_.upper_bound(static_cast<const char*>(data));
  if (next == blocks_.begin()) return nullptr;
  Block* block = std::prev(next)->second.get();
  return static_cast<const char*>(data) < block->base + block->bytes ? block : nullptr;
}

void Machine::access(int actor, uint64_t time, const Range& range, bool writes, const std::string& what) {
  if (range.low >= range.high) return;
  Block* block = find(range.low);
  if (block == nullptr) return;
  const Clock& clock = clock_of(actor);
  if (!block->live) violation(name_of(actor) + ": " + what + " uses memory that is freed");
  std::vector<Access> kept;
  kept.reserve(block->accesses.size() + 1);
  for (Access& old : block->accesses) {
    const bool meets = old.low < range.high && range.low < old.high;
    if (!meets) {
      kept.push_back(std::move(old));
      continue;
    }
    const bool ordered = covers(clock, old);
    if (!ordered && (writes || old.writes)) {
      violation(what + " on " + name_of(actor) + (writes ? " writes" : " reads") + " memory that " + old.what +
                " on " + name_of(old.actor) + (old.writes ? " writes" : " reads") + ", and nothing orders the two" +
                (block->stream < 0 ? " (pinned host memory)" : ""));
    }
    const bool inside = range.low <= old.low && old.high <= range.high;
    // A write covers what it waited for.  A read covers earlier reads of the same actor.
    const bool superseded = inside && ordered && (writes || (!old.writes && old.actor == actor));
    if (!superseded) kept.push_back(std::move(old));
  }
  kept.push_back({range.low, range.high, actor, time, writes, what, graph_ != nullptr});
  block->accesses = std::move(kept);
}

void Machine::violation(const std::string& text) {
  if (!checks || !seen_.insert(text).second) return;
  violations_.push_back("simulated CUDA: " + text);
}

void Machine::check_raised() {
  Lock lock(*this);
  if (!raises || num_raised_ == violations_.size()) return;
  std::string text;
  for (; num_raised_ < violations_.size(); ++num_raised_) text += (text.empty() ? "" : "\n") + violations_[num_raised_];
  throw std::runtime_error(text);
}

std::string Machine::take_violations() {
  Lock lock(*this);
  std::string text;
  for (const std::string& each : violations_) text += each + "\n";
  violations_.clear();
  seen_.clear();
  num_raised_ = 0;
  return text;
}

void Machine::reset_order() {
  Lock lock(*this);
  graph_ = nullptr;
  for (size_t each = 0; each < streams_.size(); ++each) force(int(each), streams_[each].num_put);
  for (auto& [base, block] : blocks_) block->accesses.clear();
  unverified_.clear();
}

// -- work --------------------------------------------------------------------------------------------------------------

void Machine::order(int stream, const Work& work) {
  const int actor = stream + 1;
  join(streams_[stream].clock, host_);
  const uint64_t time = tick(actor);
  for (const Range& range : work.reads) access(actor, time, range, false, work.what);
  for (const Range& range : work.writes) access(actor, time, range, true, work.what);
  if (graph_ != nullptr) {
    graph_->reads.insert(graph_->reads.end(), work.reads.begin(), work.reads.end());
    graph_->writes.insert(graph_->writes.end(), work.writes.begin(), work.writes.end());
    graph_->last[stream] = time;
  }
}

void Machine::launch(int stream, Work work) {
  Lock lock(*this);
  order(stream, work);
  if (graph_ != nullptr) {
    graph_->nodes.push_back({work.what, std::move(work.run)});
    put(stream, [] {});
  } else {
    put(stream, std::move(work.run));
  }
  check_raised();
}

void Machine::launch_now(int stream, Work work) {
  Lock lock(*this);
  order(stream, work);
  force(stream, streams_[stream].num_put);
  if (graph_ != nullptr) graph_->nodes.push_back({work.what, work.run});
  work.run();
  put(stream, [] {});
  check_raised();
}

void Machine::launch_traced(
    int stream, const std::string& what,
    const std::function<void(std::vector<Range>&, std::vector<Range>&)>& run) {
  Lock lock(*this);
  Work work{what, {}, {}, nullptr};
  if (graph_ != nullptr) {
    order(stream, work);
    graph_->nodes.push_back({what, [run] {
                               std::vector<Range> reads, writes;
                               run(reads, writes);
                             }});
  } else {
    force(stream, streams_[stream].num_put);
    run(work.reads, work.writes);
    order(stream, work);
  }
  put(stream, [] {});
  check_raised();
}

void Machine::put(int stream, std::function<void()> work) {
  Stream& target = streams_[stream];
  target.work.push_back(std::move(work));
  ++target.num_put;
  if (mode_ == 0) {
    force(stream, target.num_put);
  } else if (mode_ == 2) {
    for (size_t each = 0; each < streams_.size(); ++each) {
      while (random() % 3 == 0 && streams_[each].num_done < streams_[each].num_put) advance(int(each));
    }
  }
}

void Machine::advance(int stream) {
  std::function<void()> work = std::move(streams_[stream].work.front());
  streams_[stream].work.pop_front();
  ++streams_[stream].num_done;  // first: a wait inside may come back here
  work();
}

void Machine::force(int stream, uint64_t position) {
  while (streams_[stream].num_done < position) advance(stream);
}

uint64_t Machine::random() {
  seed_ = seed_ * 6364136223846793005ULL + 1442695040888963407ULL;
  return seed_ >> 33;
}

void Machine::schedule(const std::string& name) {
  Lock lock(*this);
  for (size_t each = 0; each < streams_.size(); ++each) force(int(each), streams_[each].num_put);
  mode_ = name == "early" ? 0 : name == "late" ? 1 : 2;
  if (mode_ == 2) seed_ = std::strtoull(name.c_str() + std::strlen("random:"), nullptr, 10) * 2 + 1;
}

void Machine::host_access(const void* data, size_t bytes, bool writes, const std::string& what) {
  Lock lock(*this);
  if (bytes == 0 || blocks_.empty()) return;
  Block* block = find(data);
  if (block == nullptr || block->stream >= 0) return;
  const char* low = static_cast<const char*>(data);
  access(HOST, tick(HOST), {low, low + bytes}, writes, what);
}

// -- streams and events ------------------------------------------------------------------------------------------------

int Machine::new_stream() {
  Lock lock(*this);
  streams_.emplace_back();
  join(streams_.back().clock, host_);
  return int(streams_.size()) - 1;
}

EventPtr Machine::record(int stream) {
  Lock lock(*this);
  auto event = std::make_shared<Event>();
  join(streams_[stream].clock, host_);
  tick(stream + 1);
  event->clock = streams_[stream].clock;
  event->captured = graph_ != nullptr;
  event->stream = stream;
  event->position = streams_[stream].num_put + 1;
  put(stream, [event] { event->seconds = seconds(); });
  return event;
}

void Machine::wait(int stream, const Event& event) {
  Lock lock(*this);
  if (event.stream < 0) return;
  if (graph_ != nullptr && stream == graph_->stream && !event.captured) {
    violation("a stream that is captured waits for an event that was recorded before the capture");
  }
  join(streams_[stream].clock, event.clock);
  tick(stream + 1);
  put(stream, [this, of = event.stream, at = event.position] { force(of, at); });
}

void Machine::wait_host(const Event& event, const std::string& what) {
  Lock lock(*this);
  if (event.stream < 0) return;
  ++stats.num_host_waits;
  ++waits[what];
  join(host_, event.clock);
  force(event.stream, event.position);
}

void Machine::wait_host_for_stream(int stream, const std::string& what) {
  Lock lock(*this);
  if (graph_ != nullptr) violation(what + ": the host waits for a stream during capture of a graph");
  ++stats.num_host_waits;
  ++waits[what];
  join(host_, streams_[stream].clock);
  force(stream, streams_[stream].num_put);
}

void Machine::wait_host_for_all() {
  if (before_host_waits_for_all != nullptr) before_host_waits_for_all();
  Lock lock(*this);
  ++stats.num_host_waits;
  ++waits["synchronize the device"];
  for (size_t each = 0; each < streams_.size(); ++each) {
    join(host_, streams_[each].clock);
    force(int(each), streams_[each].num_put);
  }
}

bool Machine::query(const Event& event) {
  Lock lock(*this);
  if (event.stream < 0) return true;
  if (streams_[event.stream].num_done < event.position) {
    advance(event.stream);  // so that a loop over query() ends
    return false;
  }
  join(host_, event.clock);
  return true;
}

bool Machine::query_stream(int stream) {
  Lock lock(*this);
  if (streams_[stream].num_done < streams_[stream].num_put) {
    advance(stream);
    return false;
  }
  join(host_, streams_[stream].clock);
  return true;
}

// -- memory ------------------------------------------------------------------------------------------------------------

void Machine::verify_freed(int stream) {
  std::vector<Block*> rest;
  const int own = stream + 1;
  for (Block* block : unverified_) {
    if (block->stream != stream) {
      rest.push_back(block);
      continue;
    }
    for (const Access& old : block->accesses) {
      if (old.actor == own || old.actor == HOST || block->recorded.count(old.actor) != 0) continue;
      if (!covers(streams_[stream].clock, old)) {
        violation("memory of " + name_of(own) + " is freed while " + old.what + " on " + name_of(old.actor) +
                  (old.writes ? " writes it" : " reads it") + "; call record_stream, or wait before it is freed");
      }
    }
  }
  unverified_ = std::move(rest);
}

bool Machine::is_idle(const Block& block) {
  for (const Access& old : block.accesses) {
    if (old.actor == HOST || (block.stream >= 0 && old.actor == block.stream + 1)) continue;
    // Only what the allocator knows of holds it up: streams that were recorded, and copies of pinned memory.
    const bool known = block.stream < 0 || block.recorded.count(old.actor) != 0;
    if (known && streams_[old.actor - 1].num_done < old.time) return false;
  }
  return true;
}

Block* Machine::reuse(int stream, size_t bytes) {
  for (size_t at = idle_.size(); at-- > 0;) {
    Block* block = idle_[at];
    if (block->stream != stream || block->bytes < bytes || block->bytes > 2 * bytes || !is_idle(*block)) continue;
    idle_.erase(idle_.begin() + at);
    ++stats.num_reused;
    return block;
  }
  return nullptr;
}

void* Machine::allocate(int stream, size_t bytes) {
  Lock lock(*this);
  verify_freed(stream);
  const size_t rounded = (bytes + QUANTUM - 1) / QUANTUM * QUANTUM;
  if (size_t(stats.reserved) + rounded > RESERVED_AT_MOST && graph_ == nullptr) empty_cache();
  Block* block = graph_ == nullptr ? reuse(stream, rounded) : nullptr;
  if (block == nullptr) {
    char* base = static_cast<char*>(std::aligned_alloc(QUANTUM, rounded));
    if (base == nullptr) throw std::bad_alloc();
    auto made = std::make_unique<Block>();
    made->base = base;
    made->bytes = rounded;
    block = made.get();
    blocks_[base] = std::move(made);
    stats.reserved += rounded;
    stats.peak_reserved = std::max(stats.peak_reserved, stats.reserved);
  }
  // What others did is over: verified above, or the allocator waited for it.
  std::vector<Access> own;
  for (Access& old : block->accesses) {
    if (old.actor == stream + 1) own.push_back(std::move(old));
  }
  block->accesses = std::move(own);
  block->live = true;
  block->stream = stream;
  block->recorded.clear();
  block->wanted = rounded;
  block->of_graph = graph_ != nullptr;
  ++stats.num_allocations;
  stats.allocated += rounded;
  stats.peak_allocated = std::max(stats.peak_allocated, stats.allocated);
  join(streams_[stream].clock, host_);
  const uint64_t time = tick(stream + 1);
  access(stream + 1, time, {block->base, block->base + block->bytes}, true, "an allocation");
  if (graph_ == nullptr) {
    put(stream, [base = block->base, rounded] { std::memset(base, 0xFF, rounded); });  // NaN
  } else {
    put(stream, [] {});
  }
  return block->base;
}

void* Machine::allocate_pinned(size_t bytes) {
  Lock lock(*this);
  const size_t rounded = (bytes + QUANTUM - 1) / QUANTUM * QUANTUM;
  Block* block = reuse(-1, rounded);
  if (block == nullptr) {
    char* base = static_cast<char*>(std::aligned_alloc(QUANTUM, rounded));
    if (base == nullptr) throw std::bad_alloc();
    auto made = std::make_unique<Block>();
    made->base = base;
    made->bytes = rounded;
    block = made.get();
    blocks_[base] = std::move(made);
  }
  block->live = true;
  block->stream = -1;
  block->wanted = rounded;
  block->accesses.clear();  // the host allocator hands it out after the last copy
  block->recorded.clear();
  stats.pinned += rounded;
  return block->base;
}

void Machine::release(void* data) {
  Lock lock(*this);
  Block* block = find(data);
  if (block == nullptr || !block->live) return;
  if (block->of_graph) {
    stats.allocated -= std::exchange(block->wanted, 0);
    return;
  }
  block->live = false;
  if (block->stream < 0) {
    stats.pinned -= block->wanted;
  } else {
    stats.allocated -= block->wanted;
    unverified_.push_back(block);
  }
  idle_.push_back(block);
}

void Machine::record_stream(const void* data, int stream) {
  Lock lock(*this);
  Block* block = find(data);
  if (block != nullptr && block->stream >= 0) block->recorded.insert(stream + 1);
}

bool Machine::is_pinned(const void* data) {
  Lock lock(*this);
  Block* block = find(data);
  return block != nullptr && block->stream < 0 && block->live;
}

bool Machine::is_device(const void* data) {
  Lock lock(*this);
  Block* block = find(data);
  return block != nullptr && block->stream >= 0;
}

void Machine::empty_cache() {
  Lock lock(*this);
  for (size_t each = 0; each < streams_.size(); ++each) {
    verify_freed(int(each));
    force(int(each), streams_[each].num_put);
  }
  for (Block* block : idle_) {
    if (block->stream >= 0) stats.reserved -= block->bytes;
    std::free(block->base);
    blocks_.erase(block->base);
  }
  idle_.clear();
}

// -- graphs ------------------------------------------------------------------------------------------------------------

void Machine::begin_capture(Graph* graph, int stream) {
  Lock lock(*this);
  for (size_t each = 0; each < streams_.size(); ++each) force(int(each), streams_[each].num_put);
  graph->stream = stream;
  graph_ = graph;
}

void Machine::end_capture() {
  Lock lock(*this);
  if (graph_ == nullptr) return;
  const Clock& clock = streams_[graph_->stream].clock;
  for (const auto& [stream, time] : graph_->last) {
    const size_t actor = size_t(stream) + 1;
    if (actor >= clock.size() || clock[actor] < time) {
      violation("the capture of a graph ends while " + name_of(int(actor)) + " has work that nothing joined");
    }
  }
  graph_ = nullptr;
  for (auto& [base, block] : blocks_) {
    std::vector<Access>& all = block->accesses;
    all.erase(std::remove_if(all.begin(), all.end(), [](const Access& each) { return each.captured; }), all.end());
  }
}

bool Machine::is_capturing() {
  Lock lock(*this);
  return graph_ != nullptr;
}

void Machine::replay(Graph* graph, int stream) {
  Work work{"a graph", graph->reads, graph->writes, [graph] {
              for (Node& node : graph->nodes) node.work();
            }};
  launch(stream, std::move(work));
}

}  // namespace sim
