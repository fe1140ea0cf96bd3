// What each communicator of this process is doing, kept in memory that the node's agent reads.
//
// A process that is stuck cannot say so: the training thread may sit in C++ code or hold Python's
// lock. So every collective is written down where it passes, in a file that the process maps:
// number, name and time when it is entered, and a count of those that are complete. All of them
// pass through the virtual functions of their Backend, also those that DDP's reducer and
// functional collectives start; so these functions are wrapped, in the virtual table of whatever
// class a Backend has. Nothing here needs Python's lock.
//
// The layout of the file is that of deadpool_runtime/groups/progress.py.

#pragma once

#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/version.h>

namespace counting {

using Backend = c10d::Backend;
using Work = c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;
using Milliseconds = std::chrono::milliseconds;

constexpr uint64_t kRecent = 8;
constexpr size_t kGroups = 128;
constexpr size_t kName = 64;

struct Entry {
  std::atomic<uint64_t> number;
  std::atomic<int64_t> at_ns;
  std::atomic<uint64_t> op;
};

struct Group {
  char name[kName];
  std::atomic<uint64_t> epoch;
  std::atomic<uint64_t> entered;
  std::atomic<uint64_t> completed;
  // Waits for single messages: since when, 0 for none, and in which operation.
  std::atomic<int64_t> peer_since_ns;
  std::atomic<uint64_t> peer_op;
  Entry recent[kRecent];
};

struct Head {
  uint64_t magic;
  std::atomic<uint64_t> groups;
  // Written by Python: whether the script is in its steps, its newest complete one, since when.
  uint64_t stepping;
  int64_t step;
  int64_t since_ns;
  uint64_t epoch;
  // How long this process has waited for others, all in all: from the last entry into a collective
  // until all of its group were complete, and for single messages.
  std::atomic<int64_t> waited_ns;
};

static_assert(sizeof(Entry) == 24 && sizeof(Group) == 296 && sizeof(Head) == 56);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

constexpr size_t kFile = sizeof(Head) + kGroups * sizeof(Group);

inline int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

struct Watched {
  std::atomic<Backend*> backend{nullptr};
  // A completion that was asked for under an earlier one is not counted.
  std::atomic<uint64_t> generation{0};
};

inline Head* head = nullptr;
inline Group* groups = nullptr;
inline Watched watched[kGroups];
inline std::mutex changing;
// The group whose single messages were started last, and how many threads wait for such.
inline std::atomic<int> peer_group{-1};
inline std::atomic<int> peer_waits{0};
// Until when waits are counted: two at the same time are one.
inline std::atomic<int64_t> waited_until_ns{0};
// A collective may be made of others, which are not counted.
inline thread_local int depth = 0;

inline void note_wait(int64_t since_ns) {
  const auto now = now_ns();
  const auto until = waited_until_ns.exchange(now, std::memory_order_relaxed);
  const auto waited = now - (since_ns > until ? since_ns : until);
  if (waited > 0) {
    head->waited_ns.fetch_add(waited, std::memory_order_relaxed);
  }
}

inline int group_of(const Backend* backend) {
  const auto count = head == nullptr ? 0 : head->groups.load(std::memory_order_acquire);
  for (size_t index = 0; index < count; ++index) {
    if (watched[index].backend.load(std::memory_order_relaxed) == backend) {
      return int(index);
    }
  }
  return -1;
}

// ---------------------------------------------------------------- virtual tables

inline bool put(void** slot, void* function) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto start = reinterpret_cast<uintptr_t>(slot) & ~(page - 1);
  const auto length = reinterpret_cast<uintptr_t>(slot + 1) - start;
  auto* address = reinterpret_cast<void*>(start);
  if (mprotect(address, length, PROT_READ | PROT_WRITE) != 0) {
    return false;
  }
  *slot = function;
  mprotect(address, length, PROT_READ);
  return true;
}

// Where a virtual function stands in its class's table.
template <typename Method>
size_t place_of(Method method) {
  static_assert(sizeof(method) == 2 * sizeof(uintptr_t));
  uintptr_t parts[2];
  std::memcpy(parts, &method, sizeof(parts));
#if defined(__aarch64__) || defined(__arm__)
  return parts[0] / sizeof(void*);
#else
  return (parts[0] - 1) / sizeof(void*);
#endif
}

inline void** table_of(const void* object) {
  return *static_cast<void** const*>(object);
}

// What a table held before functions in it were wrapped, for the few classes that there are.
template <size_t Functions>
struct Originals {
  static constexpr size_t kClasses = 8;
  std::atomic<void**> tables[kClasses] = {};
  void* functions[kClasses][Functions] = {};

  void* find(void** table, size_t function) const {
    for (size_t index = 0; index < kClasses; ++index) {
      if (tables[index].load(std::memory_order_acquire) == table) {
        return functions[index][function];
      }
    }
    return nullptr;
  }

  // Wraps the functions at these places of the object's table, once; false if that cannot be.
  bool wrap(const void* object, const size_t (&places)[Functions], void* const (&by)[Functions]) {
    void** table = table_of(object);
    if (find(table, 0) != nullptr) {
      return true;
    }
    std::lock_guard<std::mutex> lock(changing);
    if (find(table, 0) != nullptr) {
      return true;
    }
    for (size_t index = 0; index < kClasses; ++index) {
      if (tables[index].load() != nullptr) {
        continue;
      }
      for (size_t which = 0; which < Functions; ++which) {
        functions[index][which] = table[places[which]];
      }
      tables[index].store(table, std::memory_order_release);
      for (size_t which = 0; which < Functions; ++which) {
        if (!put(&table[places[which]], by[which])) {
          return false;
        }
      }
      return true;
    }
    return false;
  }
};

// ---------------------------------------------------------------- waits for single messages

inline Originals<1> work_originals;

struct PeerWait {
  explicit PeerWait(int group) : group_(group) {
    if (group_ >= 0 && peer_waits.fetch_add(1) == 0) {
      groups[group_].peer_since_ns.store(now_ns(), std::memory_order_relaxed);
    }
  }
  ~PeerWait() {
    if (group_ >= 0 && peer_waits.fetch_sub(1) == 1) {
      note_wait(groups[group_].peer_since_ns.exchange(0, std::memory_order_relaxed));
    }
  }
  int group_;
};

inline bool wait_for_peer(Work* work, Milliseconds timeout) {
  using Wait = bool (*)(Work*, Milliseconds);
  const auto original = reinterpret_cast<Wait>(work_originals.find(table_of(work), 0));
  PeerWait waiting(peer_group.load(std::memory_order_relaxed));
  return original(work, timeout);
}

inline void note_message(int group, size_t op, const WorkPtr& work) {
  groups[group].peer_op.store(op, std::memory_order_relaxed);
  peer_group.store(group, std::memory_order_relaxed);
  if (work) {
    const size_t place[] = {place_of(&Work::wait)};
    void* const by[] = {reinterpret_cast<void*>(&wait_for_peer)};
    work_originals.wrap(work.get(), place, by);
  }
}

// ---------------------------------------------------------------- collectives

// From the call of a collective until it returns; its completion may be later.
struct Call {
  Call(int group, size_t op) : group_(group) {
    ++depth;
    if (group_ < 0) {
      return;
    }
    generation_ = watched[group_].generation.load(std::memory_order_relaxed);
    auto& it = groups[group_];
    const auto number = it.entered.load(std::memory_order_relaxed) + 1;
    auto& entry = it.recent[number % kRecent];
    entry.number.store(0, std::memory_order_release);
    entry.at_ns.store(now_ns(), std::memory_order_relaxed);
    entry.op.store(op, std::memory_order_relaxed);
    entry.number.store(number, std::memory_order_release);
    it.entered.store(number, std::memory_order_release);
  }
  ~Call() {
    --depth;
    if (group_ >= 0) {
      done(group_, generation_);
    }
  }
  static void done(int group, uint64_t generation) {
    if (watched[group].generation.load(std::memory_order_relaxed) != generation) {
      return;
    }
    auto& it = groups[group];
    const auto completed = it.completed.fetch_add(1, std::memory_order_release) + 1;
    if (completed == it.entered.load(std::memory_order_relaxed)) {
      note_wait(it.recent[completed % kRecent].at_ns.load(std::memory_order_relaxed));
    }
  }
  // The collective goes on after its call returned. Work that cannot tell its end counts as
  // complete with the call.
  void leave_to(const WorkPtr& work) {
    if (group_ < 0 || !work || table_of(work.get()) == mute_.load(std::memory_order_relaxed)) {
      return;
    }
    try {
      auto future = work->getFuture();
      if (!future) {
        return;
      }
      const int group = group_;
      const auto generation = generation_;
      group_ = -1;
      future->addCallback(
          [group, generation](c10::ivalue::Future&) { done(group, generation); }, false);
    } catch (const std::exception&) {
      mute_.store(table_of(work.get()), std::memory_order_relaxed);
    }
  }
  // The class whose work has no future, which it takes an exception to find out.
  static inline std::atomic<void**> mute_{nullptr};

  int group_;
  uint64_t generation_ = 0;
};

enum class Kind { collective, message };

// From 2.14 on a Backend has these under names of their own, and forwards the old ones to them.
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
#define COUNTED_SINGLE(X)                           \
  X(all_gather_single, collective)                  \
  X(all_gather_single_coalesced, collective)        \
  X(gather_single, collective)                      \
  X(gather_into_tensor, collective)                 \
  X(reduce_scatter_single, collective)              \
  X(reduce_scatter_single_coalesced, collective)    \
  X(all_to_all_single, collective)
#else
#define COUNTED_SINGLE(X)
#endif

#define COUNTED(X)                                  \
  X(broadcast, collective)                          \
  X(allreduce, collective)                          \
  X(allreduce_sparse, collective)                   \
  X(allreduce_coalesced, collective)                \
  X(reduce, collective)                             \
  X(allgather, collective)                          \
  X(_allgather_base, collective)                    \
  X(allgather_coalesced, collective)                \
  X(allgather_into_tensor_coalesced, collective)    \
  X(gather, collective)                             \
  X(scatter, collective)                            \
  X(reduce_scatter, collective)                     \
  X(_reduce_scatter_base, collective)               \
  X(reduce_scatter_tensor_coalesced, collective)    \
  X(alltoall_base, collective)                      \
  X(alltoall, collective)                           \
  X(barrier, collective)                            \
  X(monitoredBarrier, collective)                   \
  X(send, message)                                  \
  X(recv, message)                                  \
  X(recvAnysource, message)                         \
  COUNTED_SINGLE(X)

enum class Op : size_t {
#define X(name, kind) name,
  COUNTED(X)
#undef X
      count
};
constexpr auto kOps = static_cast<size_t>(Op::count);

inline const char* const op_names[] = {
#define X(name, kind) #name,
    COUNTED(X)
#undef X
};

inline Originals<kOps> backend_originals;

template <Op Which, Kind What, typename Method>
struct Wrapper;

// The wrapped function is called as the compiler calls a virtual one: with the object first.
template <Op Which, Kind What, typename Result, typename... Arguments>
struct Wrapper<Which, What, Result (Backend::*)(Arguments...)> {
  static Result call(Backend* backend, Arguments... arguments) {
    constexpr auto op = static_cast<size_t>(Which);
    using Function = Result (*)(Backend*, Arguments...);
    const auto original =
        reinterpret_cast<Function>(backend_originals.find(table_of(backend), op));
    const int group = depth == 0 ? group_of(backend) : -1;
    if constexpr (What == Kind::message) {
      Result work = original(backend, static_cast<Arguments>(arguments)...);
      if (group >= 0) {
        note_message(group, op, work);
      }
      return work;
    } else if constexpr (std::is_void_v<Result>) {
      Call call(group, op);
      original(backend, static_cast<Arguments>(arguments)...);
    } else {
      Call call(group, op);
      Result work = original(backend, static_cast<Arguments>(arguments)...);
      call.leave_to(work);
      return work;
    }
  }
};

// ---------------------------------------------------------------- for Python

// Keep the record in this memory, which must stay mapped as long as the process lives.
inline void keep_in(uintptr_t address, size_t nbytes) {
  if (nbytes < kFile) {
    throw std::invalid_argument("the memory for the record of collectives is too small");
  }
  groups = reinterpret_cast<Group*>(address + sizeof(Head));
  head = reinterpret_cast<Head*>(address);
}

// From here on the collectives of `backend` are those of the group `name` in `epoch`, counted from
// one. False if they cannot be counted.
inline bool watch(const c10::intrusive_ptr<Backend>& backend, const std::string& name, uint64_t epoch) {
  if (head == nullptr) {
    return false;
  }
  static const size_t places[] = {
#define X(name, kind) place_of(&Backend::name),
      COUNTED(X)
#undef X
  };
  static void* const by[] = {
#define X(name, kind)                                                          \
  reinterpret_cast<void*>(                                                     \
      &Wrapper<Op::name, Kind::kind, decltype(&Backend::name)>::call),
      COUNTED(X)
#undef X
  };
  if (!backend_originals.wrap(backend.get(), places, by)) {
    return false;
  }
  std::lock_guard<std::mutex> lock(changing);
  const auto short_name = name.substr(0, kName - 1);
  const auto count = head->groups.load();
  size_t index = 0;
  while (index < count && short_name != groups[index].name) {
    ++index;
  }
  if (index == kGroups) {
    return false;
  }
  auto& group = groups[index];
  watched[index].backend = nullptr;
  watched[index].generation.fetch_add(1);
  std::memcpy(group.name, short_name.c_str(), short_name.size() + 1);
  group.entered = 0;
  group.completed = 0;
  group.peer_since_ns = 0;
  for (auto& entry : group.recent) {
    entry.number = 0;
  }
  group.epoch = epoch;
  watched[index].backend = backend.get();
  if (index == count) {
    head->groups.store(count + 1, std::memory_order_release);
  }
  return true;
}

inline std::vector<std::string> names() {
  return {op_names, op_names + kOps};
}

} // namespace counting
