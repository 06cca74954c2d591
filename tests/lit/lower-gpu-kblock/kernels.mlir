// The kernels of a product, how they are launched, and what their inner loops do.
// RUN: gossamer-opt %s -p 'expose-storage,lower-gpu-kblock,canonicalize,cse' --split-input-file | filecheck %s

// One kernel for each width of tile, which take what the function took, without workspace and threads. A launch has 512
// threads a block: 16 warps, each with twice as many rows as a lane has tokens.
// CHECK-NOT:   func.func
// CHECK-LABEL: gpu.func @sizes_t128(
// CHECK-SAME:    %{{.*}}: memref<?x300xf32>, %{{.*}}: memref<?xi32>, %{{.*}}: memref<?xi16>, %{{.*}}: memref<?xf32>, %{{.*}}: memref<?x200xf32>)
// CHECK-SAME:    kernel attributes {kernel.launch = {blocks = 2 : i64, shared = 98304 : i64, threads = 512 : i64, tokens = 128 : i64}, known_block_size = array<i32: 512, 1, 1>}
// CHECK-LABEL: gpu.func @sizes_t64(
// CHECK-SAME:    kernel.launch = {blocks = 4 : i64, shared = 49152 : i64, threads = 512 : i64, tokens = 64 : i64}
// CHECK-LABEL: gpu.func @sizes_t32(
// CHECK-SAME:    kernel.launch = {blocks = 7 : i64, shared = 24576 : i64, threads = 512 : i64, tokens = 32 : i64}
#KB = #sparse_tensor.encoding<{
  map = (d0, d1) -> (d1 floordiv 128 : dense, d0 : dense, d1 mod 128 : compressed), posWidth = 32, crdWidth = 16
}>
func.func @sizes(%x: tensor<?x300xf32>, %w: tensor<200x300xf32, #KB>) -> tensor<?x200xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 32 : i64, reduction = 1 : i64, schedule = "gpu-kblock", tile = [128, 128, 128]} : (tensor<?x300xf32>, tensor<200x300xf32, #KB>) -> tensor<?x200xf32>
  return %y : tensor<?x200xf32>
}

// -----

// Three blocks of columns; the tile of x is staged between two barriers, four columns at a time where K allows it. A nonzero
// is a pair in shared memory, all lanes read the same one, and multiply their own tokens with it: four at once, then the rest.
// CHECK-LABEL: gpu.func @loops_t32(
// CHECK:         scf.for %[[BLOCK:.*]] = %c0 to %c3 step %c1 iter_args(%{{.*}} = %[[ZERO:.*]], %{{.*}} = %[[ZERO]]) -> (vector<1xf32>, vector<1xf32>) {
// CHECK-COUNT-2:     vector.load {{.*}} {alignment = 16 : i64} : memref<?x300xf32>, vector<4xf32>
// CHECK-COUNT-8:     memref.store {{.*}} : memref<4096xf32, #gpu.address_space<workgroup>>
// CHECK:           gpu.barrier
// CHECK:           scf.for {{.*}} -> (vector<1xf32>, vector<1xf32>) : i32 {
// CHECK:             vector.store {{.*}} {alignment = 8 : i64} : memref<16x64x2xi32, #gpu.address_space<workgroup>>, vector<2xi32>
// CHECK:             nvvm.bar.warp.sync
// CHECK:             scf.for {{.*}} step %c4_i32
// CHECK-COUNT-4:       vector.fma
// CHECK-NEXT:          scf.yield
// CHECK:             scf.for {{.*}} step %c1_i32
// CHECK:               vector.fma
// CHECK-NEXT:          scf.yield
// CHECK:             nvvm.bar.warp.sync
// CHECK:           gpu.barrier
// CHECK-NEXT:      scf.yield
#KB = #sparse_tensor.encoding<{
  map = (d0, d1) -> (d1 floordiv 128 : dense, d0 : dense, d1 mod 128 : compressed), posWidth = 32, crdWidth = 16
}>
func.func @loops(%x: tensor<?x300xf32>, %w: tensor<200x300xf32, #KB>) -> tensor<?x200xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 32 : i64, reduction = 1 : i64, schedule = "gpu-kblock", tile = [128, 128, 128]} : (tensor<?x300xf32>, tensor<200x300xf32, #KB>) -> tensor<?x200xf32>
  return %y : tensor<?x200xf32>
}

// -----

// Results are stored as many features at a time as divide their number, here two, if token and feature exist; the epilogue
// reads as many.
// CHECK-LABEL: gpu.func @epilogue_t32(
// CHECK-SAME:    %[[BIAS:[a-z0-9]*]]: memref<6xf32>, %[[OUT:[a-z0-9]*]]: memref<?x6xf32>)
// CHECK:         scf.if
// CHECK-DAG:       vector.load %[[BIAS]][%{{.*}}] {alignment = 8 : i64} : memref<6xf32>, vector<2xf32>
// CHECK-DAG:       arith.addf {{.*}} : vector<2xf32>
// CHECK:           vector.store {{.*}}, %[[OUT]][{{.*}}] {alignment = 8 : i64} : memref<?x6xf32>, vector<2xf32>
#KB = #sparse_tensor.encoding<{
  map = (d0, d1) -> (d1 floordiv 128 : dense, d0 : dense, d1 mod 128 : compressed), posWidth = 32, crdWidth = 16
}>
func.func @epilogue(%x: tensor<?x9xf32>, %w: tensor<6x9xf32, #KB>, %bias: tensor<6xf32>) -> tensor<?x6xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %b = "kernel.read"(%bias) {map = affine_map<(t, m) -> (m)>} : (tensor<6xf32>) -> f32
    %0 = arith.addf %sum, %b : f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {lanes = 32 : i64, reduction = 1 : i64, schedule = "gpu-kblock", tile = [128, 128, 128]} : (tensor<?x9xf32>, tensor<6x9xf32, #KB>) -> tensor<?x6xf32>
  return %y : tensor<?x6xf32>
}
