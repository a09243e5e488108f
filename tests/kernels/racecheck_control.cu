// Small kernels whose races are known, to see what racecheck says of each: test_sanitizer_gpu.py. argv[1]: the case.
// Warps 0-3 write 128 words of shared memory, warps 4-7 read them. Prints how many words of the output are wrong (a race may still give none).
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>

constexpr int kBlocks = 8, kWords = 128;
enum Case {
  kNoBarrier,        // racy
  kAllOfBlock,       // right: __syncthreads
  kNamedBarrier,     // right: a named barrier of all 256 threads
  kEveryArrives,     // right: an mbarrier at which every writer arrives
  kOneArrives,       // right: the writers' named barrier, then one arrives for all, as in the warp-specialised products
  kReadBeforeWait,   // racy: as kEveryArrives, read before the wait
  kNoWritersBarrier  // racy: as kOneArrives without the writers' barrier
};

__device__ unsigned address(void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ void init(unsigned long long* bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(bar)), "r"(count) : "memory");
}
__device__ void arrive(unsigned long long* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(bar)) : "memory");
}
__device__ void wait(unsigned long long* bar, int phase) {
  asm volatile(
      "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again;\n}" ::"r"(address(bar)), "r"(phase)
      : "memory");
}
__device__ void named(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

template <Case C>
__global__ void control(int* out) {
  __shared__ int words[kWords];
  __shared__ unsigned long long bar;
  constexpr bool kEvery = C == kEveryArrives || C == kReadBeforeWait, kOne = C == kOneArrives || C == kNoWritersBarrier;
  int t = threadIdx.x;
  if (t == 0) init(&bar, kEvery ? kWords : 1);
  __syncthreads();
  if (t < kWords) {
    words[t] = t * 3 + blockIdx.x;
    if (C == kOneArrives) named(1, kWords);
    if (kEvery || (kOne && t == 0)) arrive(&bar);
  }
  if (C == kAllOfBlock) __syncthreads();
  if (C == kNamedBarrier) named(2, 2 * kWords);
  if (t >= kWords) {
    int early = C == kReadBeforeWait ? words[2 * kWords - 1 - t] : 0;
    if (kEvery || kOne) wait(&bar, 0);
    out[blockIdx.x * kWords + t - kWords] = C == kReadBeforeWait ? early : words[2 * kWords - 1 - t];
  }
}

int main(int argc, char** argv) {
  using Kernel = void (*)(int*);
  const Kernel kernels[] = {control<kNoBarrier>,  control<kAllOfBlock>,     control<kNamedBarrier>,    control<kEveryArrives>,
                            control<kOneArrives>, control<kReadBeforeWait>, control<kNoWritersBarrier>};
  int which = argc > 1 ? atoi(argv[1]) : -1, *out, host[kBlocks * kWords], wrong = 0;
  if (which < 0 || which > kNoWritersBarrier) return 2;
  if (cudaMalloc(&out, sizeof host) != cudaSuccess) return 3;
  kernels[which]<<<kBlocks, 2 * kWords>>>(out);
  if (cudaMemcpy(host, out, sizeof host, cudaMemcpyDeviceToHost) != cudaSuccess) return 4;
  for (int b = 0; b < kBlocks; b++)
    for (int t = 0; t < kWords; t++) wrong += host[b * kWords + t] != (kWords - 1 - t) * 3 + b;
  printf("case %d: %d wrong words\n", which, wrong);
}
