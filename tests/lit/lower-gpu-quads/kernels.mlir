// The kernels for sixteen tokens and for eight.
// RUN: gossamer-opt %s -p 'expose-storage,lower-gpu-quads,canonicalize,cse' --split-input-file --verify-diagnostics | filecheck %s

// Two panels are on their way when the loop begins. In it, a lane takes a word of each quarter of a tile from the packed values:
// where it is follows from the mask's bits below its own, and whether it is from the mask. The sums are integers.
// CHECK-LABEL: gpu.func @rows_t16(
// CHECK-SAME:    kernel.launch = {blocks = 2 : i64, shared = 76416 : i64, threads = 256 : i64, tokens = 16 : i64}
// CHECK-COUNT-2: nvvm.cp.async.commit.group
// CHECK:         scf.for
// CHECK:           nvvm.bar.warp.sync
// CHECK:           nvgpu.device_async_copy {{.*}}, 16, {{.*}} {bypassL1}
// CHECK:           nvvm.cp.async.commit.group
// CHECK:           nvvm.cp.async.wait.group 2
// CHECK-NEXT:      nvvm.bar.warp.sync
// CHECK-COUNT-2:   nvgpu.ldmatrix {{.*}} -> vector<4x4xi8>
// CHECK:           %[[MASKS:.*]] = vector.load {{.*}} vector<4xi32>
// CHECK:           %[[OFFSETS:.*]] = vector.load {{.*}} vector<4xi16>
// CHECK:           llvm.intr.ctpop
// CHECK:           arith.select %{{.*}}, %{{.*}}, %c0_i32 : i32
// CHECK:           nvvm.mma.sync {{.*}}intOverflowBehavior = #nvvm.mma_int_overflow<wrapped>{{.*}}shape = #nvvm.shape<m = 16, n = 8, k = 32>
// CHECK:         gpu.barrier
// CHECK:         memref.store {{.*}} memref<8x576xi32, #gpu.address_space<workgroup>>
// CHECK:         gpu.barrier
// CHECK:         arith.sitofp %{{.*}} : vector<2xi32> to vector<2xf32>
// CHECK:         vector.store {{.*}} : memref<?x40xf32>, vector<2xf32>
// CHECK-LABEL: gpu.func @rows_t8(
// CHECK-SAME:    kernel.launch = {blocks = 2 : i64, shared = 64128 : i64, threads = 256 : i64, tokens = 8 : i64}
func.func @rows(%x: tensor<?x608xi8>, %w: tensor<40x608xi8, "quadfragments(reduction=1)">) -> tensor<?x40xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: i32):
    %0 = arith.sitofp %sum : i32 to f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {lanes = 32 : i64, reduction = 1 : i64, schedule = "gpu-quads", tile = [16, 32, 64]} : (tensor<?x608xi8>, tensor<40x608xi8, "quadfragments(reduction=1)">) -> tensor<?x40xf32>
  return %y : tensor<?x40xf32>
}

// -----

// Where rows of x begin at every fourth byte, they are copied by words; where at any, through registers.
// CHECK-LABEL: gpu.func @words_t16(
// CHECK:         nvgpu.device_async_copy {{.*}}, 4, %{{.*}} : memref<?x604xi8>
// CHECK-LABEL: gpu.func @words_t8(
func.func @words(%x: tensor<?x604xi8>, %w: tensor<40x604xi8, "quadfragments(reduction=1)">) -> tensor<?x40xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: i32):
    %0 = arith.sitofp %sum : i32 to f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {lanes = 32 : i64, reduction = 1 : i64, schedule = "gpu-quads", tile = [16, 32, 64]} : (tensor<?x604xi8>, tensor<40x604xi8, "quadfragments(reduction=1)">) -> tensor<?x40xf32>
  return %y : tensor<?x40xf32>
}

// -----

// CHECK-LABEL: gpu.func @bytes_t16(
// CHECK:         %[[READ:.*]] = vector.load %{{.*}} : memref<?x601xi8>, vector<1xi8>
// CHECK:         arith.select %{{.*}}, %[[READ]], %{{.*}} : vector<1xi8>
// CHECK:         vector.store {{.*}} #gpu.address_space<workgroup>>, vector<1xi8>
func.func @bytes(%x: tensor<?x601xi8>, %w: tensor<40x601xi8, "quadfragments(reduction=1)">) -> tensor<?x40xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: i32):
    %0 = arith.sitofp %sum : i32 to f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {lanes = 32 : i64, reduction = 1 : i64, schedule = "gpu-quads", tile = [16, 32, 64]} : (tensor<?x601xi8>, tensor<40x601xi8, "quadfragments(reduction=1)">) -> tensor<?x40xf32>
  return %y : tensor<?x40xf32>
}

// -----

// expected-error@unknown {{tile [16, 32, 32] is not [16, 32, 64]}}
func.func @tile(%x: tensor<?x608xi8>, %w: tensor<40x608xi8, "quadfragments(reduction=1)">) -> tensor<?x40xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: i32):
    %0 = arith.sitofp %sum : i32 to f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {lanes = 32 : i64, reduction = 1 : i64, schedule = "gpu-quads", tile = [16, 32, 32]} : (tensor<?x608xi8>, tensor<40x608xi8, "quadfragments(reduction=1)">) -> tensor<?x40xf32>
  return %y : tensor<?x40xf32>
}
