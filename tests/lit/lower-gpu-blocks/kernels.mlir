// The kernels of a product of blocks, and what they do with a panel.
// RUN: gossamer-opt %s -p 'expose-storage,lower-gpu-blocks,canonicalize,cse' --split-input-file | filecheck %s

// A thread block has a row of blocks: two rows of 32 here. Four warps share 128 tokens, two share 32. Three panels of 64 columns
// lie in shared memory. Two are on their way before the loop; in it a panel is waited for, the one after the next is started, and
// the four steps of 16 columns multiply 2 x 16 tokens by 4 x 8 rows.
// CHECK-LABEL: gpu.func @panels_t128(
// CHECK-SAME:    kernel.launch = {blocks = 2 : i64, shared = 61440 : i64, threads = 128 : i64, tokens = 128 : i64}
// CHECK:         scf.if
// CHECK-COUNT-10:  nvgpu.device_async_copy {{.*}}, 8, %{{.*}} {bypassL1}
// CHECK:         nvvm.cp.async.commit.group
// CHECK:         scf.if
// CHECK:         nvvm.cp.async.commit.group
// CHECK:         scf.for {{.*}} iter_args(%[[SLOT:.*]] = %c0, 
// CHECK-NEXT:      nvvm.cp.async.wait.group 1
// CHECK-NEXT:      gpu.barrier
// CHECK:           scf.if
// CHECK-COUNT-10:    nvgpu.device_async_copy
// CHECK:           nvvm.cp.async.commit.group
// CHECK-COUNT-4:   nvgpu.ldmatrix %{{.*}}[%[[SLOT]], {{.*}} {numTiles = 4 : i32, transpose = false} : memref<3x{{.*}}x64xbf16, #gpu.address_space<workgroup>> -> vector<4x2xbf16>
// CHECK-COUNT-8:   nvvm.mma.sync
// CHECK-COUNT-4:   nvgpu.ldmatrix
// CHECK-COUNT-8:   nvvm.mma.sync
// CHECK:           scf.yield
// CHECK-LABEL: gpu.func @panels_t32(
// CHECK-SAME:    kernel.launch = {blocks = 2 : i64, shared = 24576 : i64, threads = 64 : i64, tokens = 32 : i64}
#BSR = #sparse_tensor.encoding<{
  map = (d0, d1) -> (d0 floordiv 32 : dense, d1 floordiv 32 : compressed, d0 mod 32 : dense, d1 mod 32 : dense), posWidth = 32, crdWidth = 32
}>
func.func @panels(%x: tensor<?x256xbf16>, %w: tensor<64x256xbf16, #BSR>) -> tensor<?x64xbf16> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %0 = arith.truncf %sum : f32 to bf16
    "kernel.yield"(%0) : (bf16) -> ()
  }) {lanes = 32 : i64, reduction = 1 : i64, schedule = "gpu-blocks", tile = [128, 32, 32]} : (tensor<?x256xbf16>, tensor<64x256xbf16, #BSR>) -> tensor<?x64xbf16>
  return %y : tensor<?x64xbf16>
}

// -----

// A lane's sums of all products are neighbours: eight features, stored at once.
// CHECK-LABEL: gpu.func @features_t32(
// CHECK-SAME:    %[[OUT:[a-z0-9]*]]: memref<?x64xbf16>)
// CHECK:         %[[SUMS:.*]] = vector.from_elements {{.*}} : vector<8xf32>
// CHECK-NEXT:    %[[Y:.*]] = arith.truncf %[[SUMS]] : vector<8xf32> to vector<8xbf16>
// CHECK-NEXT:    vector.store %[[Y]], %[[OUT]][{{.*}}] {alignment = 16 : i64}
#BSR = #sparse_tensor.encoding<{
  map = (d0, d1) -> (d0 floordiv 32 : dense, d1 floordiv 32 : compressed, d0 mod 32 : dense, d1 mod 32 : dense), posWidth = 32, crdWidth = 32
}>
func.func @features(%x: tensor<?x256xbf16>, %w: tensor<64x256xbf16, #BSR>) -> tensor<?x64xbf16> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %0 = arith.truncf %sum : f32 to bf16
    "kernel.yield"(%0) : (bf16) -> ()
  }) {lanes = 32 : i64, reduction = 1 : i64, schedule = "gpu-blocks", tile = [128, 32, 32]} : (tensor<?x256xbf16>, tensor<64x256xbf16, #BSR>) -> tensor<?x64xbf16>
  return %y : tensor<?x64xbf16>
}

// -----

// Of bytes a panel has 128 columns, in as much memory; a piece of a copy has 16, and a step 32.
// CHECK-LABEL: gpu.func @bytes_t128(
// CHECK-SAME:    kernel.launch = {blocks = 2 : i64, shared = 61440 : i64, threads = 128 : i64, tokens = 128 : i64}
// CHECK-COUNT-10:  nvgpu.device_async_copy {{.*}}, 16, %{{.*}} {bypassL1}
// CHECK:           nvgpu.ldmatrix {{.*}} memref<3x{{.*}}x128xi8, #gpu.address_space<workgroup>> -> vector<4x4xi8>
// CHECK:           nvvm.mma.sync {{.*}}shape = #nvvm.shape<m = 16, n = 8, k = 32>
#BSR = #sparse_tensor.encoding<{
  map = (d0, d1) -> (d0 floordiv 32 : dense, d1 floordiv 32 : compressed, d0 mod 32 : dense, d1 mod 32 : dense), posWidth = 32, crdWidth = 32
}>
func.func @bytes(%x: tensor<?x256xi8>, %w: tensor<64x256xi8, #BSR>) -> tensor<?x64xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: i32):
    %0 = arith.sitofp %sum : i32 to f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {lanes = 32 : i64, reduction = 1 : i64, schedule = "gpu-blocks", tile = [128, 32, 32]} : (tensor<?x256xi8>, tensor<64x256xi8, #BSR>) -> tensor<?x64xf32>
  return %y : tensor<?x64xf32>
}
