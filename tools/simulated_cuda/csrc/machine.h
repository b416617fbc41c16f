// Streams, events, memory and the order checker of the simulated device.  Knows no torch.
//
// Order.  Every actor (the host, and each stream) counts its operations.  A clock says how many operations of every
// actor are known to be over: a stream's clock grows when it waits for an event, the host's when it waits for a stream
// or an event, and a launch hands the host's clock to the stream.  Two accesses to the same bytes, one of them a
// write, are in order if the clock of the later actor covers the earlier access.  This holds for every schedule a GPU
// could choose, not for the one that is run; an access that is not covered is a violation even if its value was right.
//
// Memory.  Allocation is a write by the allocating stream, because the block's former owner may still be at work
// there.  A freed block may be handed out by the next allocation on its stream; so at that moment the stream's clock
// must cover what other streams did with the block, unless record_stream told the allocator about them.
//
// Schedules.  "early" runs an operation when it is launched.  "late" runs it when somebody needs it: the host waits,
// or an operation that makes new values has to run.  "random:SEED" decides at every launch how far each stream goes.
//
// Rejected: one clock for each host thread.  Locks and queues hand work between threads where nothing can be seen, and
// every such hand-over would be reported.
#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace sim {

using Clock = std::vector<uint64_t>;  // by actor: number of operations known to be over
constexpr int HOST = 0;               // actor; stream s is actor s + 1
constexpr int DEFAULT_STREAM = 0;

struct Range {
  const char* low;
  const char* high;
};

struct Access {
  const char* low;
  const char* high;
  int actor;
  uint64_t time;  // the actor's count behind the access
  bool writes;
  std::string what;
  bool captured;  // into a graph: it happens at every replay, not now
};

struct Block {
  char* base;
  size_t bytes;     // of the memory
  size_t wanted;    // of the tensor, rounded as the caching allocator does
  int stream;       // that allocated it; -1: pinned host memory
  bool live = true;
  bool of_graph = false;  // allocated during capture: the graph keeps it
  std::set<int> recorded;        // actors that record_stream named
  std::vector<Access> accesses;  // since the last one that covers them
};

struct Event {
  Clock clock;
  int stream = -1;       // -1: never recorded
  uint64_t position = 0;  // of the record in the stream
  double seconds = 0.0;   // when it ran
  bool captured = false;  // into a graph
};
using EventPtr = std::shared_ptr<Event>;

struct Stream {
  Clock clock;
  std::deque<std::function<void()>> work;
  uint64_t num_put = 0;
  uint64_t num_done = 0;
};

struct Node {
  std::string what;
  std::function<void()> work;
};

struct Graph {
  int stream = 0;  // of the capture
  std::vector<Node> nodes;
  std::vector<Range> reads, writes;
  std::map<int, uint64_t> last;  // by stream: position of its last captured launch
};

struct Work {
  std::string what;
  std::vector<Range> reads, writes;
  std::function<void()> run;
};

struct Stats {
  int64_t allocated = 0, peak_allocated = 0, reserved = 0, peak_reserved = 0, pinned = 0;
  int64_t num_allocations = 0, num_host_waits = 0, num_reused = 0;
};

class Machine {
 public:
  static Machine& get();

  // Work.  A launch raises what was found since the last one; everything is kept for take_violations.
  void launch(int stream, Work work);      // may run later; a captured launch only joins the graph
  void launch_now(int stream, Work work);  // what comes before it in the stream runs first
  // Runs now; `run` fills in what it has read and written.
  void launch_traced(int stream, const std::string& what, const std::function<void(std::vector<Range>&, std::vector<Range>&)>& run);
  void host_access(const void* data, size_t bytes, bool writes, const std::string& what);

  // Streams and events.
  int new_stream();
  EventPtr record(int stream);
  void wait(int stream, const Event& event);
  void wait_host(const Event& event, const std::string& what);
  void wait_host_for_stream(int stream, const std::string& what);
  void wait_host_for_all();
  bool query(const Event& event);
  bool query_stream(int stream);

  // Memory.
  void* allocate(int stream, size_t bytes);
  void release(void* data);
  void* allocate_pinned(size_t bytes);
  void record_stream(const void* data, int stream);
  bool is_pinned(const void* data);
  bool is_device(const void* data);
  void empty_cache();

  // Graphs.
  void begin_capture(Graph* graph, int stream);
  void end_capture();
  bool is_capturing();
  void replay(Graph* graph, int stream);

  // Reports.
  void schedule(const std::string& name);
  std::string take_violations();
  void reset_order();  // runs everything and forgets all accesses
  void check_raised();  // throws the violations that nobody has seen yet, if it `raises`
  Stats stats;
  std::map<std::string, int64_t> waits;  // of the host, by what waited
  bool checks = true;
  bool raises = true;
  void (*before_host_waits_for_all)() = nullptr;  // of the collectives, whose work is done elsewhere

 private:
  std::recursive_mutex mutex_;
  std::vector<Stream> streams_{1};
  Clock host_;
  std::map<const char*, std::unique_ptr<Block>> blocks_;
  std::vector<Block*> idle_;                 // freed, device and pinned
  std::vector<Block*> unverified_;           // freed, not yet seen by an allocation on their stream
  std::vector<std::string> violations_;
  std::set<std::string> seen_;
  size_t num_raised_ = 0;
  Graph* graph_ = nullptr;
  int mode_ = 0;  // 0 early, 1 late, 2 random
  uint64_t seed_ = 0;

  class Lock;
  uint64_t tick(int actor);
  static void join(Clock& into, const Clock& from);
  bool covers(const Clock& clock, const Access& access) const;
  const Clock& clock_of(int actor) const { return actor == HOST ? host_ : streams_[actor - 1].clock; }
  Block* find(const void* data);
  void access(int actor, uint64_t time, const Range& range, bool writes, const std::string& what);
  void violation(const std::string& text);
  void put(int stream, std::function<void()> work);
  void force(int stream, uint64_t position);
  void advance(int stream);
  void verify_freed(int stream);
  bool is_idle(const Block& block);
  Block* reuse(int stream, size_t bytes);
  void order(int stream, const Work& work);
  uint64_t random();
};

}  // namespace sim
