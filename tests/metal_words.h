// The words of Metal that compute kernels use, for a CPU.
//
// The 32 lanes of a simdgroup are fibers. Each runs on its own until it comes to a simd
// operation, where it leaves its value and waits for the others; a launch ends with a
// message if they do not all come to the same operation. Simdgroups run one by one, so
// there is no threadgroup memory, no barrier and no atomic here.
//
// What includes this defines SIMD_ORDER, the order in which simd_sum adds: butterfly or
// sequential. It also defines emulator::run_thread.

#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>

#include <type_traits>

using uint = uint32_t;

struct uint3 {
  uint x, y, z;
};

#define UINT3_OPERATOR(OP)                       \
  static uint3 operator OP(uint3 a, uint3 b) {   \
    return {a.x OP b.x, a.y OP b.y, a.z OP b.z}; \
  }
UINT3_OPERATOR(+)
UINT3_OPERATOR(-)
UINT3_OPERATOR(*)
UINT3_OPERATOR(/)

namespace emulator {

// --- floats of 16 bits ------------------------------------------------------------

// They are computed in float and rounded after each operation. A float has more than
// twice their digits, so that rounding twice is as good as rounding once.
template <typename Format>
struct Narrow {
  uint16_t bits;

  Narrow() = default;
  template <typename Number>
  Narrow(Number number) : bits(Format::rounded(static_cast<float>(number))) {}
  operator float() const { return Format::widened(bits); }
  Narrow operator-() const { return -static_cast<float>(*this); }
};

// With an integer the result stays narrow; with a float, C++ widens by itself.
#define NARROW_OPERATOR(OP)                                                      \
  template <typename Format>                                                     \
  Narrow<Format> operator OP(Narrow<Format> a, Narrow<Format> b) {               \
    return static_cast<float>(a) OP static_cast<float>(b);                       \
  }                                                                              \
  template <typename Format, typename Integer,                                   \
            typename = std::enable_if_t<std::is_integral_v<Integer>>>            \
  Narrow<Format> operator OP(Narrow<Format> a, Integer b) {                      \
    return a OP Narrow<Format>(b);                                               \
  }                                                                              \
  template <typename Format, typename Integer,                                   \
            typename = std::enable_if_t<std::is_integral_v<Integer>>>            \
  Narrow<Format> operator OP(Integer a, Narrow<Format> b) {                      \
    return Narrow<Format>(a) OP b;                                               \
  }                                                                              \
  template <typename Format, typename Number>                                    \
  Narrow<Format>& operator OP##=(Narrow<Format>& a, Number b) {                  \
    return a = a OP b;                                                           \
  }
NARROW_OPERATOR(+)
NARROW_OPERATOR(-)
NARROW_OPERATOR(*)
NARROW_OPERATOR(/)

template <typename To, typename From>
To same_bits(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

struct Half {
  static uint16_t rounded(float value) {
    return same_bits<uint16_t>(static_cast<_Float16>(value));
  }
  static float widened(uint16_t bits) { return same_bits<_Float16>(bits); }
};

struct Brain {  // the upper half of a float
  static uint16_t rounded(float value) {
    if (value != value) return 0x7fc0;
    uint32_t bits = same_bits<uint32_t>(value);
    uint32_t half_to_even = 0x7fff + (bits >> 16 & 1);
    return (bits + half_to_even) >> 16;
  }
  static float widened(uint16_t bits) {
    return same_bits<float>(static_cast<uint32_t>(bits) << 16);
  }
};

// --- positions --------------------------------------------------------------------

struct Position {
  uint3 thread_position_in_grid, thread_position_in_threadgroup;
  uint3 threadgroup_position_in_grid, threads_per_grid, threads_per_threadgroup;
  uint thread_index_in_threadgroup, thread_index_in_simdgroup;
  uint simdgroup_index_in_threadgroup;
};

static uint volume(uint3 size) { return size.x * size.y * size.z; }

static uint3 unravelled(uint index, uint3 size) {
  return {index % size.x, index / size.x % size.y, index / size.x / size.y};
}

static uint smaller(uint a, uint b) { return a < b ? a : b; }

static uint3 smaller(uint3 a, uint3 b) {
  return {smaller(a.x, b.x), smaller(a.y, b.y), smaller(a.z, b.z)};
}

// --- lanes ------------------------------------------------------------------------

constexpr uint LANES = 32;

struct Lane {
  Position position;
  const char* word;  // the simd operation that it waits at; null once it has ended
  int line;
  uint64_t deposit;
  ucontext_t context;
  alignas(16) char stack[256 << 10];
};

static Lane lanes[LANES];
static Lane* running;
static ucontext_t scheduler;
static uint64_t exchanged[LANES];  // the deposits of all lanes at the last operation
static char message[256];

static void run_thread(const Position& at);  // the kernel

static void wait_at(const char* word, int line) {
  running->word = word;
  running->line = line;
  swapcontext(&running->context, &scheduler);
}

static void run_lane() {
  for (;;) {
    run_thread(running->position);
    wait_at(nullptr, 0);
  }
}

// Anew for each launch, because one that fails leaves lanes in the middle of a kernel.
static void make_lanes() {
  for (Lane& lane : lanes) {
    lane.word = nullptr;
    lane.line = 0;
    getcontext(&lane.context);
    lane.context.uc_stack.ss_sp = lane.stack;
    lane.context.uc_stack.ss_size = sizeof lane.stack;
    makecontext(&lane.context, run_lane, 0);
  }
}

static void describe(const Lane& lane, char* text, size_t size) {
  int i = &lane - lanes;
  if (lane.word)
    snprintf(text, size, "lane %d waits at %s in line %d", i, lane.word, lane.line);
  else
    snprintf(text, size, "lane %d has ended or does not exist", i);
}

static bool in_step() {
  for (const Lane& lane : lanes) {
    if (lane.word == lanes->word && lane.line == lanes->line) continue;
    char first[100], other[100];
    describe(*lanes, first, sizeof first);
    describe(lane, other, sizeof other);
    snprintf(message, sizeof message, "a simdgroup diverges: %s, %s", first, other);
    return false;
  }
  return true;
}

// Runs the first lanes of a simdgroup from where they wait to where they wait next.
static void advance(uint present) {
  for (running = lanes; running < lanes + present; ++running)
    swapcontext(&scheduler, &running->context);
}

// In a group that is not full, the other lanes have ended from the start.
static bool run_simdgroup(uint present) {
  advance(present);
  while (in_step()) {
    if (!lanes->word) return true;
    for (uint i = 0; i < LANES; ++i) exchanged[i] = lanes[i].deposit;
    advance(present);
  }
  return false;
}

static bool run_threadgroup(uint3 where, uint3 grid, uint3 group) {
  uint3 origin = where * group;
  uint3 size = smaller(group, grid - origin);  // less at the edges of the grid
  for (uint first = 0; first < volume(size); first += LANES) {
    uint present = smaller(LANES, volume(size) - first);
    for (uint i = 0; i < present; ++i) {
      uint3 local = unravelled(first + i, size);
      lanes[i].position = {origin + local, local, where, grid, size,
                           first + i,      i,     first / LANES};
    }
    if (!run_simdgroup(present)) return false;
  }
  return true;
}

// What went wrong, or null.
static const char* run_grid(uint3 grid, uint3 group) {
  uint3 groups = (grid + group - uint3{1, 1, 1}) / group;
  make_lanes();
  for (uint i = 0; i < volume(groups); ++i)
    if (!run_threadgroup(unravelled(i, groups), grid, group)) return message;
  return nullptr;
}

// --- simd operations --------------------------------------------------------------

template <typename Value>
struct Group {
  Value of[LANES];
};

// What all lanes bring, once they have come to this word of this line.
template <typename Value>
Group<Value> gathered(Value value, const char* word, int line) {
  static_assert(sizeof value <= sizeof running->deposit);
  memcpy(&running->deposit, &value, sizeof value);
  wait_at(word, line);
  Group<Value> all;
  for (uint i = 0; i < LANES; ++i) memcpy(&all.of[i], &exchanged[i], sizeof value);
  return all;
}

// Neighbours first, then pairs of neighbours: what adding simd_shuffle_xor of 1, 2, 4,
// 8 and 16 gives in every lane, as long as the operation commutes.
template <typename Value, typename Operation>
Value butterfly(Group<Value> all, Operation operation) {
  for (uint step = 1; step < LANES; step *= 2)
    for (uint i = 0; i < LANES; i += 2 * step)
      all.of[i] = operation(all.of[i], all.of[i + step]);
  return all.of[0];
}

template <typename Value, typename Operation>
Value sequential(Group<Value> all, Operation operation) {
  for (uint i = 1; i < LANES; ++i) all.of[0] = operation(all.of[0], all.of[i]);
  return all.of[0];
}

template <typename Value>
Value simd_sum(Value value, int line = __builtin_LINE()) {
  auto plus = [](Value a, Value b) { return static_cast<Value>(a + b); };
  return SIMD_ORDER(gathered(value, "simd_sum", line), plus);
}

template <typename Value>
Value simd_max(Value value, int line = __builtin_LINE()) {
  auto larger = [](Value a, Value b) { return a < b ? b : a; };
  return butterfly(gathered(value, "simd_max", line), larger);
}

// The lane `source % 32`; what Metal gives from lane 32 on is left open.
template <typename Value>
Value simd_shuffle(Value value, uint source, int line = __builtin_LINE()) {
  return gathered(value, "simd_shuffle", line).of[source % LANES];
}

template <typename Value>
Value simd_shuffle_xor(Value value, uint mask, int line = __builtin_LINE()) {
  uint source = running->position.thread_index_in_simdgroup ^ mask;
  return gathered(value, "simd_shuffle_xor", line).of[source % LANES];
}

template <typename Value>
Value simd_shuffle_down(Value value, uint delta, int line = __builtin_LINE()) {
  uint source = running->position.thread_index_in_simdgroup + delta;
  Group<Value> all = gathered(value, "simd_shuffle_down", line);
  return source < LANES ? all.of[source] : value;  // nothing wraps around
}

}  // namespace emulator

using half = emulator::Narrow<emulator::Half>;
using float16_t = half;
using bfloat = emulator::Narrow<emulator::Brain>;
using bfloat16_t = bfloat;

namespace metal {
using emulator::simd_max;
using emulator::simd_shuffle;
using emulator::simd_shuffle_down;
using emulator::simd_shuffle_xor;
using emulator::simd_sum;
}  // namespace metal

using namespace metal;

#define device
#define constant
#define thread
